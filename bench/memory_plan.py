"""Compares the memory plan of a policy rank with what its code allocates.

counted: fake tensors at the true number of ranks, for models of any size (bench/fake_policy.py).
measured: resident memory of real ranks on this machine's CPU, at three sizes
(bench/real_policy.py).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_policy
import real_policy

from dapo_core.config.training import TrainingConfig
from dapo_core.memory.published import published_config
from dapo_core.memory.rank import rank_memory
from dapo_core.memory.shape import shape_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EXAMPLE = """examples:
  .venv/bin/python bench/memory_plan.py counted configs/dapo_qwen3_32b_math.yaml
  .venv/bin/python bench/memory_plan.py counted configs/dapo_qwen3_8b_math.yaml --layers 36
  .venv/bin/python bench/memory_plan.py measured
"""
GIB, MIB = 1024**3, 1024**2
# Hidden size, layers, tokens of a sequence, ranks: cases dominated by activations, by both, and by
# states.
MEASURED = (
    (256, 6, 4096, 1),
    (1024, 8, 1024, 1),
    (1024, 8, 96, 2),
    (1024, 24, 96, 1),
)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(required=True)
    counted = modes.add_parser("counted")
    counted.add_argument("recipes", nargs="+", type=Path)
    counted.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as in dapo plan"
    )
    counted.add_argument(
        "--layers",
        nargs="+",
        type=int,
        default=[4, 8],
        help="layer counts to build; two extrapolate to the whole model (default: 4 8)",
    )
    counted.set_defaults(
        rows=lambda options: count_recipes(options.recipes, options.set, options.layers)
    )
    modes.add_parser("measured").set_defaults(rows=lambda options: measure_sizes(MEASURED))
    options = parser.parse_args()
    for row in options.rows(options):
        print("|", " | ".join(row), "|", flush=True)


def count_recipes(
    recipes: Iterable[Path], overrides: list[str], layers: list[int]
) -> Iterator[list[str]]:
    """Yields table rows: each phase of each recipe, counted and planned."""
    from transformers import AutoConfig

    from flows.config import load_config

    yield from _header(
        "recipe",
        "model",
        "ranks",
        "tokens a rank",
        "layers counted",
        "phase",
        "counted GiB",
        "planned GiB",
    )
    for recipe in recipes:
        settings = load_config(recipe, overrides)
        name = str(settings.model.id or settings.model.path)
        published = published_config(name)
        if published is None:
            raise SystemExit(f"{recipe}: {name} is not in dapo_core/memory/published.py")
        config = on_cpu(settings)
        model_config = AutoConfig.for_model(**published)
        counted = extrapolate(model_config, config, layers)
        planned = planned_bytes(config, published)
        train = config.train
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        for phase, num_bytes in counted.items():
            yield [
                recipe.stem,
                name.rpartition("/")[2],
                f"{train.num_ranks} / {train.sequence_parallel}",
                str(longest // train.sequence_parallel),
                " and ".join(map(str, layers)),
                phase,
                f"{num_bytes / GIB:.2f}",
                f"{planned[phase] / GIB:.2f}",
                difference(planned[phase], num_bytes),
            ]


def on_cpu(settings: TrainingConfig) -> TrainingConfig:
    """The training configuration with micro-batches of one sequence, in bfloat16 on a CPU."""
    sections = {name: getattr(settings, name).model_dump() for name in TrainingConfig.model_fields}
    longest = settings.data.max_prompt_tokens + settings.rollout.max_response_tokens
    sections["data"] = {"max_prompt_tokens": settings.data.max_prompt_tokens}
    sections["model"] = {}
    sections["rollout"]["expert_parallel"] = False  # of engines; vLLM refuses it on a CPU
    sections["train"] |= {
        "device": "cpu",
        "dtype": "bfloat16",
        "micro_batch_tokens": -(-longest // settings.train.sequence_parallel),
    }
    return TrainingConfig.model_validate(sections)


def extrapolate(
    model_config: PretrainedConfig, config: TrainingConfig, layers: list[int]
) -> dict[str, float]:
    """Bytes of each phase of the whole model. Layers are alike, so two layer counts determine the
    rest.
    """
    text, peaks = model_config.get_text_config(), list[dict[str, float]]()
    num_layers = text.num_hidden_layers
    for number in layers[:2]:
        text.num_hidden_layers = number
        if hasattr(text, "layer_types"):
            text.layer_types = None
        with tempfile.TemporaryDirectory() as folder:
            counted = fake_policy.count(
                type(model_config)(**_plain(model_config)), config, Path(folder)
            )
        peaks.append({phase: float(parts[fake_policy.TOTAL]) for phase, parts in counted.items()})
    first, last = peaks[0], peaks[-1]
    further = (num_layers - layers[0]) / ((layers[-1] - layers[0]) or 1)
    return {phase: first[phase] + (last[phase] - first[phase]) * further for phase in first}


def planned_bytes(
    config: TrainingConfig, model_config: Mapping[str, Any], has_copies: bool = False
) -> dict[str, int]:
    """Bytes of a rank's tensors in each phase by the plan, with gloo's copies if `has_copies`."""
    rank = rank_memory(config, shape_of(model_config), has_copies)
    return {
        "old_log_probs": rank.states
        + rank.forward_weights
        + rank.scoring_activations
        + rank.scoring_logits,
        "update": rank.states
        + rank.update_weights
        + rank.update_gradients
        + rank.update_copies
        + rank.update_activations
        + rank.update_logits,
        "optimizer": rank.states + rank.optimizer_step,
    }


def measure_sizes(sizes: Iterable[tuple[int, int, int, int]]) -> Iterator[list[str]]:
    """Yields table rows: each phase of each size, measured, counted and planned."""
    from transformers import Qwen3Config

    yield from _header(
        "parameters", "tokens", "ranks", "phase", "measured MiB", "counted MiB", "planned MiB"
    )
    for hidden, num_layers, length, num_ranks in sizes:
        model_config = Qwen3Config(
            **real_policy.SIZES,
            hidden_size=hidden,
            num_hidden_layers=num_layers,
            intermediate_size=3 * hidden,
            tie_word_embeddings=False,
        )
        sections: dict[str, Any] = {
            "data": {"max_prompt_tokens": length // 8},
            "rollout": {"max_response_tokens": length - length // 8},
            "train": {"num_ranks": num_ranks, "micro_batch_tokens": length},
        }
        with tempfile.TemporaryDirectory() as folder:
            real_policy.write_model(model_config, Path(folder) / "real")
            measured = real_policy.measure(Path(folder) / "real", sections)
            config = TrainingConfig.model_validate(sections)
            counted = fake_policy.count(model_config, config, Path(folder) / "fake")
        counted["update"] = max(
            counted["update"], counted["optimizer"], key=lambda parts: parts[fake_policy.TOTAL]
        )
        planned = planned_bytes(config, model_config.to_dict(), has_copies=True)
        number = shape_of(model_config.to_dict()).num_parameters
        size = [f"{number / 1e6:.0f} M", str(length), str(num_ranks)]
        yield [*size, "process", f"{measured.pop('process') / MIB:.0f}", "", "", ""]
        for phase, num_bytes in measured.items():
            yield [
                *size,
                phase,
                f"{num_bytes / MIB:.0f}",
                f"{counted[phase][fake_policy.TOTAL] / MIB:.0f}",
                f"{planned[phase] / MIB:.0f}",
                difference(planned[phase], num_bytes),
            ]


def difference(planned: float, found: float) -> str:
    """The plan's deviation from what was found, in percent."""
    return f"{100 * (planned / found - 1):+.1f} %"


def _plain(model_config: PretrainedConfig) -> dict[str, Any]:
    values = model_config.to_dict()
    return {
        name: values[name] for name in values if name not in ("layer_types", "transformers_version")
    }


def _header(*names: str) -> Iterator[list[str]]:
    yield [*names, "difference"]
    yield ["---"] * (len(names) + 1)


if __name__ == "__main__":
    main()
