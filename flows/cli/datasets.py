"""`dapo datasets`: list registered datasets, and show rows as the model sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.options import SetOption

app = typer.Typer(rich_markup_mode=None)
datasets_app = typer.Typer(
    help="List registered datasets, or show rows of any dataset.", rich_markup_mode=None
)
app.add_typer(datasets_app, name="datasets")


@datasets_app.callback(
    invoke_without_command=True, epilog="Example: dapo datasets; dapo datasets show gsm8k"
)
def datasets(context: typer.Context) -> None:
    """List registered datasets, and suites of them for dapo eval --suite."""
    if context.invoked_subcommand is None:
        from eval.problems.registry import SETS, SUITES
        from flows.tables import print_sets

        print_sets(list(SETS.values()))
        for name, sets in SUITES.items():
            typer.echo(f"suite {name}: {', '.join(sets)}")


@datasets_app.command(
    "show",
    epilog="Example: dapo datasets show gsm8k --data gsm8k/train.jsonl --model models/Qwen3-8B. "
    "Own columns: dapo datasets show mine.csv --set data.columns.problem=question "
    "--set data.columns.answer=result",
    short_help="Show rows of a dataset as the model sees them.",
)
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Registered name, file, folder, or hub id.")
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Local rows of a registered dataset, not fetched then."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Model with the chat template and tokenizer to use."),
    ] = None,
    use: Annotated[
        Literal["train", "eval"] | None,
        typer.Option(help="Which rows; default: train, if the dataset has any."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, max=1000, help="Number of rows.")] = 2,
    overrides: SetOption = None,
) -> None:
    """Show the first usable rows of a dataset with prompt, gold answer and scorer."""
    from eval.problems.registry import SETS
    from flows.config import load_config_or_defaults
    from flows.tables import print_rows, print_set
    from tasks.data.reading import show_rows, source_to_show

    known = SETS.get(name)
    is_training = use == "train" or (
        use is None and (known is None or bool(known.train) or not known.test)
    )
    one = {"set": name} if data is None else {"set": name, "path": data}
    chosen = f"data.{'train' if is_training else 'eval'}={json.dumps(one)}"
    settings = load_config_or_defaults(None, [*(overrides or ()), chosen])
    tokenizer = None
    if model is not None:
        from dapo_core.model.folder import require_model_folder
        from dapo_core.model.pretrained import load_tokenizer

        require_model_folder(model)
        tokenizer = load_tokenizer(model, settings.model.trust_remote_code)
    if known is not None:
        print_set(known)
    shown, count = show_rows(settings, source_to_show(settings, is_training), rows, tokenizer)
    print_rows(shown, count)
