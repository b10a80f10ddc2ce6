"""verl's key table matches the default configurations and sources in verl's wheels."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from interop.table import Row, load
from tests.verl_wheels import verl_folder

TABLE = load("verl")
VERSIONS = TABLE.versions
pytestmark = pytest.mark.slow  # two wheels from the package registry

# Keys that the DAPO recipe and free sections add to the default configuration.
ADDED = re.compile(
    r"data\.gen_batch_size|algorithm\.filter_groups\..*|reward_model\.overlong_buffer\..*"
    r"|(reward|reward_model)\.reward_kwargs\..*"
    r"|(reward\.)?custom_reward_function\.reward_kwargs\.\*"
    r"|actor_rollout_ref\.(rollout\.(engine_kwargs\.vllm\.\*|limit_images)|ref\.model\.(\*|path)"
    r"|model\.override_config\.(attention_dropout|embd_pdrop|resid_pdrop)"
    r"|actor\.megatron\.override_transformer_config\.(\w+|\*)"
    r"|actor\.optim\.override_optimizer_config\.eps)|model_engine|hydra\.(run\.dir|output_subdir)"
)
# For keys that some versions ignore: the files in the wheel that read them, and a pattern.
READ_BY = {
    "data.truncation": ("utils/dataset/rl_dataset.py", r"self\.truncation =="),
    "data.return_full_prompt": ("utils/dataset/rl_dataset.py", r"if self\.return_full_prompt"),
    "data.return_multi_modal_inputs": (
        "utils/dataset/rl_dataset.py",
        r"if self\.return_multi_modal_inputs",
    ),
    "data.return_raw_input_ids": ("trainer/**/*.py", r"return_raw_input_ids"),
    "actor_rollout_ref.actor.grad_clip": ("workers/actor/dp_actor.py", r"self\.config\.grad_clip"),
    "actor_rollout_ref.actor.use_torch_compile": (
        "workers/actor/dp_actor.py",
        r'"use_torch_compile"',
    ),
    "actor_rollout_ref.ref.use_torch_compile": (
        "workers/actor/dp_actor.py",
        r'"use_torch_compile"',
    ),
    "actor_rollout_ref.actor.freeze_vision_tower": (
        "workers/fsdp_workers.py",
        r"freeze_vision_tower",
    ),
    "actor_rollout_ref.rollout.over_sample_rate": ("workers/rollout/**/*.py", r"over_sample_rate"),
}


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict) or not tree:
        yield name, tree
        return
    for key, value in tree.items():
        yield from leaves(value, f"{name}.{key}" if name else str(key))


@functools.cache
def composed(version: str) -> dict[str, dict[str, Any]]:
    """Return verl's composed keys and defaults of each trainer (FSDP, Megatron, ...), by file."""
    folder = verl_folder(version) / "verl" / "trainer" / "config"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {
        path.name: dict(leaves(yaml.load(path.read_text(), Loader=loader)))
        for path in sorted(folder.glob("_generated_ppo*trainer.yaml"))
    }


def keys(version: str) -> set[str]:
    return {key for of_trainer in composed(version).values() for key in of_trainer}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_key_of_a_version_has_one_row(version: str) -> None:
    assert len(keys(version)) > 400
    without, several = [], []
    for key in keys(version):
        exact = [row.key for row in TABLE.rows if key in row.names(version) and "*" not in key]
        if len(exact) > 1:
            several.append((key, exact))
        if TABLE.find(key, version) is None:
            without.append(key)
    assert without == []
    assert several == []


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_only_name_keys_that_a_version_has(version: str) -> None:
    caught: set[tuple[str, str]] = set()
    for key in keys(version):
        row = TABLE.find(key, version)
        assert row is not None
        caught.add((row.key, key))
    wrong = []
    for row in TABLE.rows:
        for name in row.names(version):
            is_there = any(row_key == row.key and stands_for(name, key) for row_key, key in caught)
            is_added = ADDED.fullmatch(name) is not None and (
                name != row.key or version in row.additions
            )
            if not is_there and not is_added:
                wrong.append((row.key, name))
            if is_there and name == row.key and not row.is_family:
                assert version in row.versions
    assert wrong == []


def stands_for(name: str, key: str) -> bool:
    below = name.endswith(".*")
    pattern = re.escape(name.removesuffix(".*") if below else name).replace(r"\*", ".*")
    return re.fullmatch(pattern + r"(\..*)?" if below else pattern, key) is not None


@pytest.mark.parametrize("version", VERSIONS)
def test_defaults_match_the_wheels(version: str) -> None:
    of_fsdp = composed(version)["_generated_ppo_trainer.yaml"]
    wrong = {}
    for row in TABLE.rows:
        known = {
            of_fsdp[name]
            for name in row.names(version)
            if isinstance(of_fsdp.get(name), str | int | float)
        }
        known |= {str(of_fsdp[name]) for name in row.names(version) if name in of_fsdp}
        if (
            version in row.defaults
            and row.names(version)
            and version in row.versions
            and not_in(row.defaults[version], known)
        ):
            wrong[row.key] = (row.defaults[version], known)
    assert wrong == {}


def not_in(default: Any, known: set[Any]) -> bool:
    return (
        default not in known
        if isinstance(default, str | int | float)
        else str(default) not in known
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("key", READ_BY)
def test_ignored_keys_are_not_read_by_verl(key: str, version: str) -> None:
    files, expression = READ_BY[key]
    folder = verl_folder(version) / "verl"
    texts = [
        path.read_text()
        for path in folder.glob(files)
        if "config" not in path.relative_to(folder).parts
    ]
    is_read = any(re.search(expression, text) for text in texts)
    row = TABLE.find(key, version)
    if row is not None:
        assert (version not in row.ignored) == is_read


def test_every_ignored_key_is_checked() -> None:
    by_range: list[Row] = [row for row in TABLE.rows if row.ignored]
    assert {row.key for row in by_range} - {"actor_rollout_ref.actor.optim.clip_grad"} == set(
        READ_BY
    )
    # 0.7 has both keys, and clips by the older one: dp_actor.py, as above.
    [clip] = [row for row in by_range if row.key == "actor_rollout_ref.actor.optim.clip_grad"]
    [older] = [row for row in TABLE.rows if row.key == "actor_rollout_ref.actor.grad_clip"]
    assert clip.ignored == older.versions - older.ignored == {"0.7.0"}
