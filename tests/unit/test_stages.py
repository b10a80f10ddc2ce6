"""What each stage's key depends on, and what a run records."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

from dapo_core.config.fields import is_volatile
from dapo_core.demo.arithmetic import generate_problems
from dapo_core.errors import ConfigError, DataError, ModelError
from dapo_core.model.pretrained import load_tokenizer
from dapo_core.model.sampling import read_eos_ids
from eval.problems.evaluation_sets import load_set
from flows.config import Config, load_config
from tasks.artifacts.artifact import Artifact, StoreError
from tasks.artifacts.stage_key import PROJECT_ROOT, StageKey
from tasks.artifacts.store import ArtifactStore
from tasks.config.data import ColumnsConfig
from tasks.config.evaluate import BenchmarkConfig
from tasks.data.layout import EVAL_FILE
from tasks.data.prepare import build_dataset
from tasks.fetched_model import link_model_folder, place_stop_tokens, require_additions
from tasks.links import link_of
from tasks.runs.history import read_runs
from tasks.runs.run import Run, current_stage
from tasks.stages import STAGES, TRAIN_POLICY, Stage
from tests.configs import make_config
from tests.recorded_runs import small_config
from tests.tiny_models import build_tiny, build_tiny_qwen3
from tests.trainings import write_parquet

CONFIG = PROJECT_ROOT / "configs" / "arith_cpu.yaml"
# The keys that each stage reads, by prefix; changing any of them rebuilds it.
READS = {
    "prepare_data": (
        "run.seed",
        "data.arithmetic.",
        "data.image_max_pixels",
        "data.shapes.",
        "data.contamination",
        "data.max_refused_ratio",
    ),
    "fetch_model": (  # of BUILD_MODEL and FETCH_MODEL
        "run.seed",
        "model.source",
        "model.recipe.",
        "model.id",
        "model.revision",
        "model.urls",
        "model.allow_pickle",
        "model.trust_remote_code",
    ),
    "train_policy": (
        *(
            "run.seed",
            "run.deterministic",
            "data.max_prompt_tokens",
            "data.too_long",
            "data.shuffle",
            "algorithm.",
            "reward.",
        ),
        "custom_reward.",
        "sampler.",
        "rollout.",
        "train.",
        "checkpoint.",
        "validation.",
        "model.trust_remote_code",
    ),
    "merge_checkpoint": ("merge.",),
    "evaluate_model": ("serve.", "evaluate.", "model.trust_remote_code"),
}
# In the key by content: the path does not count.
BY_CONTENT = {"data.train", "data.eval", "data.prompt_template", "data.system_prompt", "model.path"}
BY_CONTENT |= {
    "custom_reward.path",
    "algorithm.kl.reference_path",
    "algorithm.custom_loss.path",
    "adopt.folder",
    "adopt.log",
    "adopt.config",
    "model.chat_template",
    "model.stop_tokens",  # among the inputs, if there are any
    *(f"data.columns.{name}" for name in ColumnsConfig.model_fields),
}


def leaves(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, bool | None]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", is_volatile(type(section), name)


def changed(section: Any, name: str) -> Any:
    """The section with another value under the dotted name, valid or not."""
    head, _, rest = name.partition(".")
    value = getattr(section, head)
    if rest:
        return section.model_copy(update={head: changed(value, rest)})
    if head == "benchmarks":
        return section.model_copy(update={head: (BenchmarkConfig(set="math500"),)})
    other = (
        value + 1
        if isinstance(value, int | float) and not isinstance(value, bool)
        else f"not {value}"
    )
    return section.model_copy(update={head: other})


CONFIG_TREE = load_config(CONFIG)
FIELDS = dict(leaves(CONFIG_TREE))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_changes_only_the_keys_of_stages_that_read_it(name: str) -> None:
    readers = {stage for stage, prefixes in READS.items() if name.startswith(prefixes)}
    assert FIELDS[name] is not None, "declare it with key() or volatile()"
    is_silent = FIELDS[name] or name in BY_CONTENT
    assert is_silent or readers, "no stage has this key in its cache key"
    expected = set() if is_silent else readers
    other = changed(CONFIG_TREE, name)
    assert {
        s.name for s in STAGES if s.config_slice(other) != s.config_slice(CONFIG_TREE)
    } == expected


@pytest.mark.parametrize("stage", STAGES, ids=range(len(STAGES)))
def test_config_inputs_code_and_versions_are_all_in_the_key(stage: Stage) -> None:
    key = stage.key(CONFIG_TREE, {"a": "1"})
    assert key.key == stage.key(load_config(CONFIG), {"a": "1"}).key
    others = [
        stage.key(CONFIG_TREE, {"a": "2"}),
        replace(key, code_digest="0"),
        replace(key, versions={**key.versions, "torch": "0"}),
        replace(key, config={}),
    ]
    assert len({key.key, *(other.key for other in others)}) == 5


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return small_config(tmp_path / "store")


def prepared(config: Config) -> Artifact:
    """The data artifact of the configuration, built if missing."""
    key = link_of(config, "prepare_data").key()
    return ArtifactStore(config.store.path).produce(
        key, lambda folder: build_dataset(config, folder)
    )[0]


def inputs(label: str, config: Config, *artifacts: Artifact) -> Mapping[str, str]:
    """The inputs in the stage's key."""
    return link_of(config, label).key(*artifacts).inputs


def files_config(folder: Path, held_out: Path, *overrides: str) -> Config:
    """A configuration with own data: a training parquet in the folder, and a held-out file."""
    train_rows, _ = generate_problems(16, 4, 2, 0)
    if not (folder / "train.parquet").exists():
        write_parquet(train_rows, folder / "train.parquet")
    paths = (f"data.train={folder / 'train.parquet'}", f"data.eval={held_out}")
    return load_config(CONFIG, [*paths, f"store.path={folder / 'store'}", *overrides])


def math500_file(path: Path, answers: tuple[int, ...] = (2, 4, 6)) -> Path:
    rows = [
        {
            "problem": f"Find ${number} + 0$.",
            "solution": f"It is $\\boxed{{{number}}}$.",
            "answer": str(number),
            "subject": "Algebra",
            "level": 1 + i,
            "unique_id": f"test/{i}.json",
        }
        for i, number in enumerate(answers)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_changed_training_row_trains_again_but_is_not_evaluated_again(tmp_path: Path) -> None:
    held_out = math500_file(tmp_path / "eval.jsonl")
    config = files_config(tmp_path, held_out)
    model = Artifact("fetch_model", "k", "/nowhere", "m")

    def trained(data: Artifact, recipe: Config = config) -> Mapping[str, str]:
        return inputs("train_policy", recipe, data, model)

    def evaluated(data: Artifact) -> Mapping[str, str]:
        return inputs("evaluate_before", config, data, model)

    first = prepared(config)
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    rows[3]["reward_model"]["ground_truth"] = "0"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    second = prepared(config)
    assert first.key != second.key
    assert trained(first) != trained(second)
    assert inputs("fetch_model", config, first) != inputs("fetch_model", config, second)
    assert evaluated(first) == evaluated(second)
    math500_file(held_out, (2, 4, 7))
    third = prepared(config)
    assert evaluated(second) != evaluated(third)
    assert trained(second) != trained(third)
    silent = load_config(CONFIG, ["validation.every=0"])
    assert trained(second, silent) == trained(third, silent)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_own_held_out_data_is_evaluated_like_its_file(tmp_path: Path, suffix: str) -> None:
    held_out = math500_file(tmp_path / f"mine{suffix}")
    if suffix == ".parquet":
        write_parquet(generate_problems(16, 3, 1, 0)[1], held_out)
    data = prepared(files_config(tmp_path, held_out))
    assert load_set(Path(data.path) / EVAL_FILE) == load_set(held_out)
    metrics = data.manifest()["metrics"]
    assert (metrics["train_rows"], metrics["eval_rows"]) == (16, 3)


def test_a_missing_file_of_own_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval\.0: .*gone\.jsonl is not a file"):
        link_of(files_config(tmp_path, tmp_path / "gone.jsonl"), "prepare_data").key()


def test_a_changed_custom_scorer_trains_again(tmp_path: Path) -> None:
    scorer = tmp_path / "mine.py"
    scorer.write_text("def compute_score(**_):\n    return 1\n")
    own = small_config(tmp_path / "store", f"custom_reward.path={scorer}")
    data = prepared(own)
    model = replace(data, digest="m")
    first = inputs("train_policy", own, data, model)
    without = inputs("train_policy", load_config(CONFIG), data, model)
    assert without.items() < first.items()
    scorer.write_text("def compute_score(**_):\n    return 2\n")
    assert inputs("train_policy", own, data, model) != first


def test_a_changed_reference_model_trains_again(tmp_path: Path) -> None:
    folders = [build_tiny(tmp_path / name, "qwen3", seed=3) for name in ("here", "there")]
    own, moved = (
        small_config(
            tmp_path / "store", f"algorithm.kl.reference_path={folder}", "algorithm.kl.place=loss"
        )
        for folder in folders
    )
    data = prepared(own)
    model = replace(data, digest="m")
    assert TRAIN_POLICY.config_slice(own) == TRAIN_POLICY.config_slice(moved)
    first = inputs("train_policy", own, data, model)
    assert "kl_reference" in first
    os.utime(folders[0] / "config.json", (1, 1))
    assert inputs("train_policy", own, data, model) != first
    (folders[0] / "config.json").unlink()
    with pytest.raises(
        ModelError, match=r"lacks config\.json; set algorithm\.kl\.reference_path to a complete"
    ):
        inputs("train_policy", own, data, model)


def test_data_without_a_scorer_is_refused_unless_configured(tmp_path: Path) -> None:
    rows = [{**row, "data_source": "mine"} for row in generate_problems(16, 4, 2, 0)[0]]
    write_parquet(rows, tmp_path / "train.parquet")
    held_out = math500_file(tmp_path / "eval.jsonl")
    with pytest.raises(DataError, match="data_source 'mine' has no scorer"):
        prepared(files_config(tmp_path, held_out))
    config = files_config(tmp_path, held_out, "reward.scorers=[mine=math_dapo]")
    assert prepared(config).manifest()["metrics"]["train_rows"] == 16


def test_before_and_after_share_the_evaluation_of_an_unchanged_model(config: Config) -> None:
    data = prepared(config)
    model, merged = (Artifact("stage", key, "/nowhere", "digest") for key in ("one key", "another"))
    before, after = (link_of(config, f"evaluate_{side}") for side in ("before", "after"))
    assert before.key(data, model).key == after.key(data, merged).key


def model_config(folder: Path, model: Path) -> Config:
    return make_config(model, store={"path": str(folder / "store")})


@pytest.mark.slow
def test_a_local_model_is_linked_and_changes_are_detected(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"  # as in the cache of the Hugging Face hub
    source = build_tiny_qwen3(repository / "snapshots" / "abc")
    source.rename(repository / "blobs")
    source.mkdir()
    for blob in (repository / "blobs").iterdir():
        (source / blob.name).symlink_to(f"../../blobs/{blob.name}")
    config = model_config(tmp_path, source)
    data = prepared(config)
    key = link_of(config, "fetch_model").key(data)
    store = ArtifactStore(config.store.path)
    taken, _ = store.produce(key, lambda folder: {"bytes": link_model_folder(config.model, folder)})
    weights = Path(taken.path) / "model.safetensors"
    assert os.path.samefile(weights, repository / "blobs" / "model.safetensors")
    assert not any(path.is_symlink() for path in Path(taken.path).iterdir())
    assert taken.manifest()["metrics"]["bytes"] == sum(
        path.stat().st_size for path in source.iterdir()
    )
    assert link_of(config, "fetch_model").key(data) == key
    replaced = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").write_bytes(replaced + b" ")
    assert link_of(config, "fetch_model").key(data) != key
    assert store.lookup(taken.stage, taken.key) == taken  # the old one is as it was


def test_a_chat_template_does_not_modify_the_local_model(tmp_path: Path) -> None:
    source = build_tiny_qwen3(tmp_path / "model")
    theirs = (source / "chat_template.jinja").read_bytes()
    template = tmp_path / "mine.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    config = make_config(source, model={"path": str(source), "chat_template": str(template)})
    (tmp_path / "taken").mkdir()
    link_model_folder(config.model, tmp_path / "taken")
    assert (tmp_path / "taken/chat_template.jinja").read_bytes() == template.read_bytes()
    assert (source / "chat_template.jinja").read_bytes() == theirs
    require_additions(config.model, tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"model was made without model\.chat_template=.*mine"):
        require_additions(config.model, source)  # `dapo train` would ignore the recipe's template
    first = link_of(config, "fetch_model").key()
    template.write_text(template.read_text() + "A:")
    assert link_of(config, "fetch_model").key().key != first.key
    template.unlink()
    with pytest.raises(
        ConfigError, match=r"model\.chat_template=.*mine\.jinja cannot be read: No such file"
    ):
        link_of(config, "fetch_model").key()


def test_stop_tokens_reach_every_engine_and_do_not_modify_the_local_model(tmp_path: Path) -> None:
    source = build_tiny_qwen3(tmp_path / "model")
    (ending,) = read_eos_ids(source)
    user = load_tokenizer(source).convert_tokens_to_ids("<|user|>")
    config = make_config(
        source, model={"path": str(source), "stop_tokens": ["<|user|>", "<|end|>"]}
    )
    (tmp_path / "taken").mkdir()
    link_model_folder(config.model, tmp_path / "taken")
    assert read_eos_ids(tmp_path / "taken") == [ending, user]
    assert read_eos_ids(source) == [ending]
    require_additions(config.model, tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"made without model\.stop_tokens=<|user|> <|end|>"):
        require_additions(config.model, source)
    (tmp_path / "taken/generation_config.json").unlink()
    place_stop_tokens(["<|user|>"], tmp_path / "taken")  # whose eos_token_id is in config.json
    assert read_eos_ids(tmp_path / "taken") == [ending, user]
    plain = make_config(source, model={"path": str(source)})
    keys = [link_of(each, "fetch_model").key().key for each in (config, plain)]
    assert keys[0] != keys[1]


def test_a_run_records_and_links_each_finished_stage(config: Config) -> None:
    run = Run.start(config)
    key = StageKey("probe", {}, {}, "code", {})
    stages_seen: list[str] = []

    def build(folder: Path) -> dict[str, Any]:
        stages_seen.append(current_stage.get())
        (folder / "content").write_text("x")
        return {}

    built = run.produce("evaluate_before", key, build)
    [recorded] = read_runs(Path(config.store.path))
    assert ([*recorded.stages], recorded.state) == (["evaluate_before"], "running")
    again = run.produce("evaluate_after", key, build)
    run.record(report={"n": 1})
    [recorded] = read_runs(Path(config.store.path))
    assert (built, stages_seen, current_stage.get()) == (again, ["evaluate_before"], "")
    assert [stage.cached for stage in recorded.stages.values()] == [False, True]
    assert (recorded.num_cached, recorded.num_built) == (1, 1)
    assert (recorded.id, recorded.name, recorded.report) == (run.folder.name, "arith_cpu", {"n": 1})
    assert (run.folder / "evaluate_after" / "content").read_text() == "x"
    assert not os.path.isabs(os.readlink(run.folder / "evaluate_after"))  # the store can be moved
    assert load_config(run.config_path) == config


def test_a_failed_stage_is_not_recorded(config: Config) -> None:
    with pytest.raises(ZeroDivisionError), Run.start(config) as run:
        run.produce(
            "prepare_data", StageKey("probe", {}, {}, "code", {}), lambda folder: {"n": 1 // 0}
        )
    [recorded] = read_runs(Path(config.store.path))
    assert (run.stages, current_stage.get(), recorded.stages) == ({}, "", {})
    assert (recorded.state, str(recorded.error).partition(":")[0]) == (
        "failed",
        "ZeroDivisionError",
    )
    assert not (run.folder / "prepare_data").exists()


def test_a_path_that_blocks_the_run_folder_is_named(config: Config) -> None:
    store = Path(config.store.path)
    store.mkdir()
    (store / "runs").touch()
    with pytest.raises(StoreError, match=r"cannot be written: .*Not a directory: .*/runs/"):
        Run.start(config)
    (store / "runs").unlink()
    run = Run.start(config)
    key = StageKey("probe", {}, {}, "code", {})
    run.store.lock_path("probe", key.key).mkdir()
    with pytest.raises(StoreError, match=r"cannot be written: .*Is a directory: .*\.lock"), run:
        run.produce("prepare_data", key, lambda folder: {})
