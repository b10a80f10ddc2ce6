"""The command line: output, refusals and exit status."""

import contextlib
import io
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from typer.testing import CliRunner

from flows.cli import GROUPS, app, main
from tasks.chain import resume_options
from tests.evaluations import write_results
from tests.recorded_runs import LABELS
from tests.tiny_models import build_tiny_qwen3

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/arith_cpu.yaml"


def commands(group: Any = None, words: str = "") -> Iterator[str]:
    """Yield every `dapo` command; commands of a group follow its name."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if command.callback is not None:
            yield f"{words}{name}"
        yield from commands(command, f"{words}{name} ") if hasattr(command, "commands") else ()


def dapo(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `dapo WORDS` in this process, which saves loading everything again."""
    command, stdout, stderr = ["dapo", *map(str, words)], io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", command)
        patch.setenv("COLUMNS", "200")
        patch.setenv("NO_COLOR", "1")
        with pytest.raises(SystemExit) as end:
            main()
    return subprocess.CompletedProcess(
        command, int(end.value.code or 0), stdout.getvalue(), stderr.getvalue()
    )


def refusal(*words: str | Path) -> str:
    """The message of a command that must be refused, without a traceback or output."""
    done = dapo(*words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def test_messages_of_a_command_that_prints_json_are_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a new process
    record = tmp_path / "runs" / "20260101T000000.000Z-1" / "run.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    done = dapo("runs", "--store", tmp_path, "--json")
    assert done.stdout == "[]\n"
    assert "run skipped" in done.stderr


def test_config_show_prints_derived_numbers_to_stderr() -> None:
    done = dapo("config", "show", CONFIG, "--set", "rollout.num_workers=1500")
    assert yaml.safe_load(done.stdout)["rollout"]["num_workers"] == 1500  # nothing but YAML there
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in done.stderr.splitlines()
        if "│" in line
    ]
    assert ["policy", "2", "devices", "train.num_ranks"] in rows
    assert ["rollouts", "1,500", "devices"] in [row[:3] for row in rows]
    assert [
        "an optimizer step",
        "64",
        "responses",
        "train.mini_prompts x rollout.group_size",
    ] in rows  # 8 x 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["config", "show", CONFIG, "--set", "train.totl_steps=3"],
            "did you mean train.total_steps?",
        ),
        (
            ["plan", "no/such.yaml"],
            "configuration no/such.yaml cannot be read: No such file or directory",
        ),
        (["merge", "no/checkpoint", "no/target"], "no/checkpoint has no complete checkpoint"),
        (["adopt", "nowhere", CONFIG], "folder nowhere does not exist"),
        (["run", CONFIG, "--set", "store.path=README.md/store"], "store.path to another directory"),
        (
            ["plan", "configs/arith-cpu.yml"],
            "No such file or directory (did you mean configs/arith_cpu.yaml?)",
        ),
        (
            ["plan", CONFIG, "run.seed=2"],
            "argument(s) (run.seed=2); to change a key, use --set SECTION.KEY=VALUE",
        ),
        (["runs", "latest"], "dapo runs show latest; all: "),
        (["datasets", "gsm8k"], "dapo datasets show gsm8k; all: "),
        (["runs", "shwo"], "No such command 'shwo'. Did you mean 'show'?\n"),
        (["config", CONFIG], f"No such command '{CONFIG}'.\n"),
        (
            ["init", "x.yaml", "--model", "m", "--data", "a", "--data", "b"],
            "--data is given 2 times; give one",
        ),
        (["serve", "no/model"], "; set MODEL to a Hugging Face folder"),
        (
            ["eval", "--base-url", "http://127.0.0.1:1", "--data", "x.csv", "--output", "o"],
            "x.csv is not a file",
        ),
    ],
)
def test_a_refusal_is_one_clear_message(words: list[str], message: str) -> None:
    stderr = refusal(*words)
    assert message in stderr
    assert stderr.count(message) == 1


def test_an_error_message_does_not_repeat_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789")
    assert "configuration [redacted].yaml cannot be read" in refusal("plan", "sk-0123456789.yaml")


def test_serve_needs_no_recipe_and_checks_the_model_first(tmp_path: Path) -> None:
    model_path = build_tiny_qwen3(tmp_path / "model")  # 512 positions
    stderr = refusal("serve", model_path, "--set", "serve.max_model_len=513")
    assert f"serve.max_model_len=513 is above the 512 positions of {model_path}" in stderr
    assert "VLLM_API_KEY" not in stderr


@pytest.mark.parametrize(
    ("resume", "attempt", "words"),
    [
        ("never", 1, []),
        ("never", 2, ["--set", "checkpoint.resume=auto"]),  # keeps the first attempt's checkpoints
        ("auto", 2, []),
        ("/old/step_000020", 2, []),  # no checkpoint of its own yet: starts from the same one
    ],
)
def test_a_retry_resumes_the_first_attempt_or_its_starting_checkpoint(
    resume: str, attempt: int, words: list[str]
) -> None:
    assert resume_options(resume, attempt) == words


@pytest.mark.parametrize(
    ("error", "status"), [(TypeError("a bug"), 2), (KeyError("passes on"), None)]
)
def test_a_bug_shows_a_traceback_and_is_not_retried(
    error: Exception,
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("flows.cli.app", fail)
    with pytest.raises(SystemExit if status else KeyError) as end:
        main()
    if status:
        assert getattr(end.value, "code", None) == status
        assert "TypeError: a bug" in capsys.readouterr().err


def test_plan_of_an_empty_store_writes_nothing(tmp_path: Path) -> None:
    store = tmp_path / "store"
    done = dapo("plan", CONFIG, "--set", f"store.path={store}")
    rows = [
        [cell.strip() for cell in line.split("│")[1:5]]
        for line in done.stdout.splitlines()
        if "│" in line
    ]
    assert [row[:2] for row in rows] == [[label, "runs"] for label in LABELS]
    assert rows[0][2] == "never built"
    assert len(rows[0][3]) == 16  # the data's key is known
    assert rows[1][2:] == ["waits for prepare_data", "after prepare_data"]
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_for_another_machine_can_be_planned(tmp_path: Path) -> None:
    done = dapo("plan", CONFIG, "--set", f"store.path={tmp_path}", "--set", "train.device=npu")
    assert all(label in done.stdout for label in LABELS)
    assert done.returncode == 2
    assert "devices: train.device=npu" in done.stderr


@pytest.mark.parametrize("words", ["merge-checkpoint", "evaluate-model --side before", "compare"])
def test_a_stage_without_inputs_is_refused_and_records_no_run(tmp_path: Path, words: str) -> None:
    stderr = refusal("stage", *words.split(), CONFIG, "--set", f"store.path={tmp_path}")
    assert "has no output of prepare_data for this configuration" in stderr
    assert (
        "build it with dapo stage prepare-data CONFIG, or the whole chain with dapo run CONFIG"
        in stderr
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_inspecting_a_missing_store_writes_nothing(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert f"there is no store {none}" in refusal("runs", "--store", none)
    assert "there is no store README.md" in refusal("runs", "--store", "README.md")
    assert dapo("runs", "--store", tmp_path).stdout == f"no runs in {tmp_path}\n"
    assert f"there is no store {none}" in refusal("runs", "show", "latest", "--store", none)
    assert f"there is no store {none}" in refusal("compare", "latest~1", "latest", "--store", none)
    assert f"there is no store {none}" in refusal("runs", "gc", "--keep-runs", "3", "--store", none)
    assert f"there is no store {none}" in refusal(
        "export", "abc", tmp_path / "model", "--store", none
    )
    assert "is a folder, and only a run has a model" in refusal("export", "tests", tmp_path / "log")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_compare_prints_markdown_and_writes_only_to_output(tmp_path: Path) -> None:
    before = write_results(tmp_path / "before", "rwww")
    after = write_results(tmp_path / "after", "wrrw")
    done = dapo("compare", before, after)
    assert done.stdout.startswith("# Before/after report")
    assert re.search(
        r"^\| accuracy +\| +25\.0 % \| +50\.0 % \| +\+25\.0 \|$", done.stdout, re.MULTILINE
    )
    assert (
        "No significant change in accuracy: 25.0 % before, 50.0 % after"
        in done.stdout.splitlines()[-1]
    )
    assert {path.name for path in tmp_path.iterdir()} == {"before", "after"}
    dapo("compare", before, after, "--output", tmp_path / "report")
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "report.json",
        "report.md",
        "report.html",
    }
    done = dapo(
        "compare", "--history", before, after, tmp_path / "report", "--output", tmp_path / "nights"
    )
    assert len(re.findall(r"^\| 2", done.stdout, re.MULTILINE)) == 2  # the report covers `after`
    assert ": 1 later run reused this evaluation from the store." in done.stdout
    assert {path.name for path in (tmp_path / "nights").iterdir()} == {"history.html"}


def test_compare_refuses_incomparable_evaluations(tmp_path: Path) -> None:
    before = write_results(tmp_path / "before", "rw")
    assert "needs BEFORE and AFTER, got 1; add --history for more" in refusal("compare", before)
    other = write_results(tmp_path / "after", "rww")
    assert "1 of 3 items are only in after (first: '2')" in refusal("compare", before, other)


def test_prepare_data_writes_both_sets_and_never_overwrites(tmp_path: Path) -> None:
    output = tmp_path / "data"
    sizes = ("--set", "data.arithmetic.num_train=64", "--set", "data.arithmetic.num_eval=16")
    done = dapo("prepare-data", CONFIG, "--output", output, *sizes)
    assert done.stdout == f"{output}: 64 training and 16 held-out problems\n"
    counts = {path.name: pq.read_metadata(path).num_rows for path in output.glob("*.parquet")}
    assert {"data_card.json", "data_card.md"} < {path.name for path in output.iterdir()}
    assert counts == {"train.parquet": 64, "eval.parquet": 16}
    assert sorted(path.name for path in output.glob("data_card.*")) == [
        "data_card.json",
        "data_card.md",
    ]
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert f"--output {output} is not empty" in refusal("prepare-data", CONFIG, "--output", output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_an_unusable_output_folder_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    paths = ("--data", file, "--model", tmp_path)
    for command in (("prepare-data", CONFIG), ("train", CONFIG, *paths)):
        for place, problem in ((file, "File exists"), (file / "data", "Not a directory")):
            stderr = f"cannot create --output {place}: {problem}; choose another folder"
            assert stderr in refusal(*command, "--output", place)
    assert "set store.path to another directory" in refusal(
        "plan", CONFIG, "--set", f"store.path={file}"
    )


def test_a_training_that_fails_its_checks_leaves_no_output_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    paths = ("--data", tmp_path / "t.parquet", "--model", tmp_path / "no")
    assert "does not exist" in refusal("train", CONFIG, *paths, "--output", output)
    assert not output.exists()


def test_prepare_data_counts_unusable_rows(tmp_path: Path) -> None:
    prompts = [[{"role": "user", "content": text}] for text in ("1 + 1?", " ", "2 + 2?", "")]
    rows = [
        {"data_source": "math_dapo", "prompt": p, "reward_model": {"ground_truth": "2"}}
        for p in prompts
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "e.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    changes = (f"data.train={tmp_path}/t.parquet", f"data.eval={tmp_path}/e.jsonl")
    options = [word for change in changes for word in ("--set", change)]
    output = tmp_path / "data"
    stderr = refusal("prepare-data", CONFIG, "--output", output, *options)
    assert re.search(
        r"t\.parquet: 2 of 4 rows cannot be used \(2 with an empty prompt.*row 1: ", stderr
    )
    assert not output.exists()  # so the fixed file can use the same folder


@pytest.mark.slow
def test_sigterm_says_that_the_same_command_continues() -> None:
    program = """
import os, signal, time
from prefect.utilities.engine import capture_sigterm  # around each flow run
from flows.cli.chain import message_when_stopped

with message_when_stopped(), capture_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 128 + signal.SIGTERM
    assert ended.stderr == "stopped; run the same command again to continue\n"


@pytest.mark.parametrize("command", commands())
def test_help_has_an_example_of_the_command(command: str) -> None:
    shown = CliRunner().invoke(app, [*command.split(), "--help"])
    assert shown.exit_code == 0
    example = " ".join(shown.output.partition("Example:")[2].split())
    assert f"dapo {command} " in example


def test_version_is_shown() -> None:
    shown = CliRunner().invoke(app, ["--version"]).output
    assert shown == f"dapo-pipeline {version('dapo-pipeline')}\n"


@pytest.mark.parametrize("words", [[], ["run"], ["runs", "gc"]])
def test_h_shows_the_help_of_every_command(words: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*words, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output


def test_a_shell_completes_commands() -> None:
    asked = {"_DAPO_COMPLETE": "complete_bash", "COMP_WORDS": "dapo ru", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, env=asked, prog_name="dapo").output.split() == ["run", "runs"]


def test_help_lists_every_command_of_daily_use_in_a_group() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted([*listed, "prepare-data", "fetch-model", "track", "train"]) == sorted(
        typer.main.get_command(app).commands
    )
    assert len(listed) <= 20
    output = CliRunner().invoke(app, ["--help"]).output
    assert re.findall(r"^(?=\S)(.+):$", output, re.MULTILINE) == ["Options", *GROUPS]
    lines = re.findall(r"^  [a-z].*$", output, re.MULTILINE)
    assert [line.split()[0] for line in lines] == listed
    assert all(re.search(r"[^.]\.$", line) for line in lines)  # no sentence is cut


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("train-polcy", CONFIG),
            "NAME: 'train-polcy' is not a stage (did you mean train-policy?)",
        ),
        (
            ("train-policy", CONFIG, "--side", "before"),
            "train-policy of this recipe has no side before; it has none",
        ),
        (
            ("evaluate-model", CONFIG, "--side", "bas"),
            "has no side bas; it has before, after: evaluate.baselines",
        ),
        (("compare", CONFIG, "--force"), "compare always writes a new report"),
    ],
)
def test_stage_refuses_invalid_arguments_before_prefect_starts(
    words: tuple[str, ...], message: str
) -> None:
    assert message in " ".join(refusal("stage", *words).split())


@pytest.mark.slow
def test_datasets_lists_the_registry_and_shows_rows_as_the_model_sees_them(tmp_path: Path) -> None:
    listed = dapo("datasets").stdout
    assert all(
        re.search(words, listed) for words in (r"aime24\W+eval ", r"aime25\W+eval\* ", "CC BY 4.0")
    )
    rows = tmp_path / "mine.csv"
    rows.write_text(
        "question,result,hint\nWhat is 1 + 1?,002,count\n,3,\nAnd NA?,NA,x\n", encoding="utf-8"
    )
    columns = ("--set", "data.columns.problem=question", "--set", "data.columns.answer=result")
    template = "data.prompt_template='{problem} Hint: {hint}. In \\boxed{hint}.'"
    model = build_tiny_qwen3(tmp_path / "model")
    shown = dapo("datasets", "show", rows, *columns, "--set", template, "--model", model).stdout
    assert "row-0: answer '002', scored by exact" in shown
    assert "What is 1 + 1? Hint: count. In \\boxed{hint}.<|end|>\n<|assistant|>" in shown
    assert "row-2: answer 'NA'" in shown
    assert "unusable: 1 with no question, such as row 1:" in shown
    assert "mine.csv has no column hnt" in refusal(
        "datasets", "show", rows, *columns, "--set", "data.prompt_template='{problem} {hnt}'"
    )
    assert "which the prompt would reveal" in refusal(
        "datasets", "show", rows, *columns, "--set", "data.prompt_template='{problem} {result}'"
    )
    assert "row-0: answer '002', scored by exact" in dapo("datasets", "show", rows).stdout
    choices = tmp_path / "mmlu.jsonl"
    choices.write_text('{"question": "1 + 1?", "choices": ["1", "2"], "answer": 1}\n')
    shown = dapo("datasets", "show", choices).stdout
    assert "answer 'B', scored by choice" in shown
    assert "user: 1 + 1?\n\nA. 1\nB. 2\n" in shown
    assert "did you mean gsm8k" in refusal("datasets", "show", "gsm9k")
    (tmp_path / "gsm.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    shown = dapo("datasets", "show", "gsm8k", "--data", tmp_path / "gsm.jsonl").stdout
    assert "hf:openai/gsm8k@main" in shown
    assert "put your final answer within \\boxed{}" in shown
