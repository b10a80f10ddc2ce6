"""Configuration: precedence, a message for each mistake, a lossless dump, and no unused key."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dapo_core.config.fields import is_volatile, result_values
from dapo_core.config.loading import dump_config
from dapo_core.errors import ConfigError
from flows.config import Config, load_config, load_config_or_defaults, resolve_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
BASE = "data:\n  train: arithmetic\n  eval: arithmetic\nmodel:\n  source: recipe\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE + "train:\n  learning_rate: 1e-5\n  warmup_steps: 3\n", encoding="utf-8")
    return path


def _resolve(**sections: Any) -> Config:
    data = {"train": "arithmetic", "eval": "arithmetic"}
    return resolve_config({"data": data, "model": {"source": "recipe"}, **sections})


def _leaves(
    section: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """(key, the section it stands in, its declaration) of every key."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, section, field


LEAVES = {key: (section, field) for key, section, field in _leaves()}


def test_overrides_take_precedence_over_the_file_and_the_file_over_defaults(recipe: Path) -> None:
    config = load_config(
        recipe, ["train.warmup_steps=7", "rollout.group_size=4", "rollout.group_size=8"]
    )
    assert config.train.warmup_steps == 7  # --set over the file
    assert config.train.learning_rate == 1e-5  # the file over the default
    assert config.train.weight_decay == 0.1  # the default
    assert config.rollout.group_size == 8  # the last --set


def test_defaults_are_the_papers_recipe() -> None:
    config = load_config_or_defaults(None)
    assert (config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high) == (0.2, 0.28)
    assert config.algorithm.loss_aggregation == "token-mean"
    assert config.sampler.dynamic
    assert config.reward.overlong.enabled
    sizes = config.train.train_prompts, config.train.mini_prompts, config.rollout.group_size
    assert sizes == (512, 32, 16)
    assert config.rollout.max_response_tokens - config.reward.overlong.buffer_tokens == 16384


def test_overrides_are_read_as_yaml(recipe: Path) -> None:
    overrides = [
        "serve.extra_args=[--enable-prefix-caching]",
        "data.shuffle=off",
        "algorithm.kl.place=off",
    ]
    overrides += ["train.learning_rate=2e-6", "train.ray_address=null", "run.name=a=b"]
    config = load_config(recipe, [*overrides, "reward.overlong={enabled: no}"])
    assert config.serve.extra_args == ("--enable-prefix-caching",)
    assert (config.data.shuffle, config.algorithm.kl.place) == (False, "off")
    assert config.train.learning_rate == 2e-6
    assert config.train.ray_address is None
    assert config.run.name == "a=b"
    assert config.reward.overlong.enabled is False
    for text, value in (("1.5E-3", 1.5e-3), (".5", 0.5), ("1", 1.0), ("'1e-4'", 1e-4)):
        assert load_config(recipe, [f"train.learning_rate={text}"]).train.learning_rate == value


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("{problem}", "{problem}"),
        ("{problem} = ", "{problem} ="),
        ("Answer: yes", "Answer: yes"),
        ("- # *bold* @ 1:30", "- # *bold* @ 1:30"),
        ("007", "007"),
        ("1e-6", "1e-6"),
        ("yes", "yes"),
        ("true", "true"),
        ("2024-13-01", "2024-13-01"),
        ('"a\\nb"', "a\nb"),
        ('"a" or "b"', '"a" or "b"'),
        ("[x]", "[x]"),
        ("null", None),
        ("", None),
    ],
)
def test_a_text_key_takes_what_is_typed(recipe: Path, given: str, text: str | None) -> None:
    config = load_config(recipe, [f"data.system_prompt={given}"])
    assert config.data.system_prompt == text


def test_lists_of_texts_take_numbers_as_typed_and_a_single_text(recipe: Path) -> None:
    config = load_config(recipe, ["serve.extra_args=[--seed, 080]", "data.columns.problem=Q: text"])
    assert config.serve.extra_args == ("--seed", "080")
    assert config.data.columns.problem == ("Q: text",)


@pytest.mark.parametrize("other", ["lora.rank=4", "compile=true", "fsdp_size=2", "num_ranks=3"])
def test_experts_are_not_divided_where_that_is_not_built(recipe: Path, other: str) -> None:
    overrides = ["train.num_ranks=4", "train.expert_parallel=2", f"train.{other}"]
    with pytest.raises(ConfigError, match=r"train\.expert_parallel=2") as raised:
        load_config(recipe, overrides)
    assert f"train.{other}" in str(raised.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learnig_rate=1", r"unknown key train\.learnig_rate = 1 \(did you mean"),
        ("train.lr=1", r"unknown key train\.lr = 1 \(did you mean train\.learning_rate\?\)"),
        ("rollout.tp=2", r"did you mean rollout\.tensor_parallel or rollout\.top_p\?"),
        ("checkpoint.every=1", r"unknown key .* \(did you mean checkpoint\.save_every\?\)"),
        ("train.xyz=1", r"unknown key train\.xyz = 1; `dapo config explain train` lists its keys"),
        ("xyz.a=1", r"unknown key xyz = \{'a': 1\}; `dapo config show` lists all keys"),
        ("reward.scorers=x", r"reward\.scorers = 'x' is refused: it must be a list, such as"),
        ("train.total_steps=0", r"train\.total_steps = 0 is refused: it must be at least 1"),
        ("train.total_steps=", r"train\.total_steps is empty: it must be a whole number, at"),
        ("data.shuffle=maybe", r"data\.shuffle = 'maybe' is refused: it must be true or false"),
        ("run.seed=true", r"run\.seed = True is refused: it must be a whole number, at least 0"),
        ("train.device=tpu", r"train\.device = 'tpu' is refused: it must be 'cpu', 'cuda' or"),
        ("store.path=${STORE}", r"store\.path = '\$\{STORE\}' still holds a placeholder; put the"),
        ("train.total_steps", r"'train\.total_steps' must have the form section\.key=value, such"),
        ("train=", r"--set 'train=' would replace a whole section; set its keys: train\.KEY=VALUE"),
        ("seed=1", r"unknown key seed = 1 \(did you mean run\.seed or "),
        ("total_steps=5", r"unknown key total_steps = 5 \(did you mean train\.total_steps\?\)"),
        ("train.warmup_steps.x=5", r"--set train\.warmup_steps\.x: warmup_steps is a value, not"),
        ("train.keep=[a", r"--set 'train\.keep=\[a': the value is not valid YAML"),
        ("run.seed=2024-13-01", r"--set 'run\.seed=2024-13-01': the value is not valid YAML:"),
        ("train.mini_prompts=30", r"train\.train_prompts=512 is not a multiple of"),
        ("train.num_ranks=7", r"train\.mini_prompts=32 x rollout\.group_size=16 = 512 responses"),
        ("sampler.gen_prompts=51", r"sampler\.gen_prompts=51 x sampler\.max_num_gen_batches=10 ="),
        ("data.train=[]", r"data\.train is not set; set it to a registered name"),
        ("data.train=[gsm8k, gsm8k]", r"data\.train names a set twice"),
        (
            "data.columns={problem: [a, b], messages: c}",
            r"data\.columns\.problem=a, b and data\.columns\.messages=c both name the problem",
        ),
        ("evaluate.benchmarks=[{set: math500, sampels: 4}]", r"evaluate\.benchmarks has no key"),
        ("evaluate.benchmarks=[math500, math500]", "names 'math500' twice; give one of them"),
        ("evaluate.benchmarks=[{set: math500, name: pooled}]", "'pooled' names a folder and a"),
        ("evaluate.headline=math500", r"evaluate\.headline=math500 is not in"),
        ("evaluate.gates=[math500 is good]", r"'math500 is good' is not of the form NAME"),
        ("evaluate.baselines=[{name: base}]", "base sets none of path, id and base_url; set"),
        ("evaluate.baselines=[{name: b, path: x, id: o/n}]", "b sets path and id of path, id and"),
        ("evaluate.baselines=[{name: b, path: x, model: m}]", "model of b would be ignored by"),
        ("evaluate.baselines=[{name: b, base_url: 'http://h'}]", "b has base_url; set `model` to"),
        (
            "evaluate.baselines=[{name: b, base_url: 'http://u:pw@h', model: m}]",
            r"^[^@]*base_url of b holds a user",
        ),
        ("evaluate.baselines=[{name: before, path: x}]", "'before' names a column beside before,"),
        (
            "evaluate.baselines=[{name: b, path: x}, {name: B, path: y}]",
            r"evaluate\.baselines names 'b' twice",
        ),
        ("evaluate.checkpoints=20", r"evaluate\.checkpoints=20 is neither a list of steps, such"),
        ("evaluate.checkpoints=[30]", r"lists step 30, but checkpoint\.save_every=20 does not"),
        ("evaluate.checkpoints=[100000]", r"lists step 100000, but train\.total_steps=\d+; use"),
        ("model.source=path", r"model\.source is path, but model\.path is not set"),
        ("model.path=qwen", r"model\.path=qwen would be ignored by model\.source=recipe; set"),
        ("model.source=huggingface", r"model\.source is huggingface, but model\.id is not set;"),
        ("model.revision=v1", r"model\.revision=v1 would be ignored .*model\.source=huggingface"),
        ("reward.overlong.buffer_tokens=20480", "buffer_tokens=20480 is not below"),
        ("serve.max_model_len=22527", r"= 22528 is above serve\.max_model_len=22527.*raise"),
    ],
)
def test_bad_input_is_refused_with_its_value_and_the_fix(
    recipe: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(recipe, [override])


def test_model_references_are_validated() -> None:
    for model, said in (
        ({"source": "huggingface", "id": "qwen"}, r"model\.id=qwen is not of the form ORG/NAME"),
        (
            {"source": "url", "urls": ["https://a.org/b"]},
            r"https://a\.org/b is not pinned: append #sha256=",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            _resolve(model=model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.rollout_correction.importance=token", "rollout.top_p=0.9"],
            r"importance=token, mask=off, divergence=off\) with rollout\.top_p=0\.9, .* set "
            r"rollout\.top_p=1",
        ),
        (
            ["algorithm.rollout_correction.mask=sequence", "rollout.top_k=20"],
            r"mask=sequence, divergence=off\) with rollout\.top_p=1\.0, rollout\.top_k=20 "
            r".*rollout\.top_k=-1",
        ),
        (
            ["rollout.top_p=0.9"],
            r"sampler\.max_staleness=3 with rollout\.top_p=0\.9, rollout\.top_k=-1 would train "
            r".*Set sampler\.max_staleness=0, .* or rollout\.top_p=1 and rollout\.top_k=-1",
        ),
        (["rollout.top_k=20"], r"sampler\.max_staleness=3 with .*rollout\.top_k=20 would train"),
        (
            ["algorithm.old_log_probs=engine", "rollout.top_p=0.9"],
            r"old_log_probs=engine with rollout\.top_p=0\.9, .* rollout\.top_k=-1, or "
            r"old_log_probs=policy",
        ),
        (
            ["algorithm.old_log_probs=engine", "algorithm.rollout_correction.importance=token"],
            r"importance=token with algorithm\.old_log_probs=engine would correct twice.* or "
            r"old_log_probs=policy",
        ),
        (
            ["custom_reward.path=score.py", "reward.scorers=[mine=choice]"],
            r"reward\.scorers=\['mine=choice'\] would be ignored, because "
            r"custom_reward\.path=score\.py",
        ),
        (
            ["train.offload_activations=true", "train.gradient_checkpointing=false"],
            r"would copy every activation .*; set train\.gradient_checkpointing=true",
        ),
        (
            ["custom_reward.path=score.py", "custom_reward.arguments={bonus:2}"],
            r"'bonus:2' is not the name of an argument; YAML needs a space .* \{bonus: 2\}",
        ),
        (
            ["custom_reward.name=mine"],
            r"custom_reward\.name=mine would be ignored without custom_reward\.path",
        ),
        (["train.lora.alpha=8"], r"train\.lora would be ignored by train\.lora\.rank=0; set it"),
        (["rollout.lora=merged"], r"would be ignored by train\.lora\.rank=0"),
        (
            ["train.lora.rank=4", "rollout.lora=merged", "rollout.dtype=bfloat16"],
            r"merged with rollout\.dtype=bfloat16 would lose the updates.*rollout\.lora=adapter",
        ),
        (
            ["train.lora.rank=4", "rollout.lora=merged", "train.device=cuda"],
            r"rollout\.dtype=auto would lose",
        ),
        (  # bfloat16 on a CPU that is faster in it
            ["train.lora.rank=4", "rollout.lora=merged"],
            r"rollout\.dtype=auto would lose",
        ),
        *(
            (
                ["train.lora.rank=4", "rollout.lora=merged", "rollout.dtype=float32", *keys],
                rf"merged with {keys[-1]} on (cuda|npu) cannot send weights",
            )
            for keys in (
                ["train.device=cuda", "train.num_ranks=1", "train.placement=colocated"],
                ["train.device=npu", "train.offload_shards=true"],
            )
        ),
        (
            ["train.lora.rank=4", "rollout.pipeline_parallel=2"],
            r"train\.lora with rollout\.pipeline_parallel=2 fails on a CPU",
        ),
        (
            ["train.lora.rank=4", "algorithm.kl.place=loss", "algorithm.kl.refresh_every=9"],
            r"reference is the policy without its adapters; set algorithm\.kl\.refresh_every=0",
        ),
        (  # 512 x 16 = 8192 responses, 5 x 1638 = 8190
            [
                "algorithm.kl.place=reward",
                "algorithm.kl.controller=adaptive",
                "algorithm.kl.horizon=1638",
            ],
            r"are 5\.0 times algorithm\.kl\.horizon=1638; .* Raise algorithm\.kl\.horizon, .* "
            r"32768",
        ),
    ],
)
def test_contradicting_keys_are_refused(recipe: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(recipe, overrides)


@pytest.mark.parametrize(
    "override",
    [
        "sampler.max_staleness=0",
        "sampler.gen_prompts=512",  # of 512 in a step: nothing ahead
        "algorithm.rollout_correction.importance=off",
        "algorithm.compat=verl",
    ],
)
def test_top_p_is_allowed_where_no_old_token_counts_as_fresh(recipe: Path, override: str) -> None:
    assert load_config(recipe, ["rollout.top_p=0.9", override]).rollout.top_p == 0.9


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as unknown:
        _resolve(train={"total_stepz": 1}, run={"name": "${NAME}"}, rollouts={})
    assert len(str(unknown.value).splitlines()) == 3
    with pytest.raises(ConfigError) as bounds:
        _resolve(train={"total_steps": 0}, rollout={"group_size": 1})
    assert len(str(bounds.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [1", r"configuration .*bad\.yaml is not valid YAML"),
        ("- a\n- b\n", r"configuration .*bad\.yaml contains a list instead of sections with keys"),
        (BASE + "train: 5\n", r"train is a section with keys, not the value 5"),
        ("run:\n  seed: 1\n  seed: 2\n", "seed is written twice, the second time in"),
        (BASE + "reward:\n  overlong: {enabled: yes, enabled: no}\n", "enabled is written twice"),
        (BASE + "1: 2\n", "unknown key 1 = 2"),
    ],
)
def test_a_bad_file_is_refused_with_the_location(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_an_unreadable_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"absent\.yaml cannot be read: No such file or directory"
    ):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes("run:\n  name: é\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml is not valid YAML: 'utf-8' codec"):
        load_config(tmp_path / "latin.yaml")


def test_empty_sections_and_files_mean_defaults(tmp_path: Path) -> None:
    path = tmp_path / "dapo.yaml"  # the file's name is that of the run
    path.write_text(BASE + "train:\nreward:\n  overlong:\nrun:\n", encoding="utf-8")
    assert load_config(path) == _resolve()
    assert load_config(path.rename(tmp_path / "mine.yaml")).run.name == "mine"
    assert load_config(tmp_path / "mine.yaml", ["run.name=other"]).run.name == "other"
    path.write_text(BASE + "train:\n", encoding="utf-8")
    assert load_config(path, ["train.total_steps=3"]).train.total_steps == 3
    assert load_config(path, ["reward.overlong.buffer_tokens=3"]).reward.overlong.buffer_tokens == 3
    path.write_text("# nothing yet\n", encoding="utf-8")
    assert (
        load_config(path, ["data.train=arithmetic", "data.eval=arithmetic", "model.source=recipe"])
        == _resolve()
    )
    path.write_text("data:\nmodel:\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.train is not set.*\n.*data\.eval is not set"):
        load_config(path)


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "data: {train: arithmetic, eval: arithmetic}\nmodel: {source: recipe}\n"
        "serve: &limits\n  max_num_seqs: 7\nrollout:\n  <<: *limits\n  group_size: 4\n",
        encoding="utf-8",
    )
    config = load_config(path)
    assert (config.rollout.max_num_seqs, config.rollout.group_size) == (7, 4)
    assert config.serve.max_num_seqs == 7


def test_a_dump_loads_back_to_the_same_configuration(tmp_path: Path) -> None:
    config = _resolve(
        run={"name": "größe: 1e-5 # no comment", "seed": 2**31 - 1},
        train={"learning_rate": 1.1e-7, "warmup_steps": 0},
        serve={
            "extra_args": ["--enable-prefix-caching", "null", "1e-6", "yes", ""],
            "memory_gigabytes": 0.1,
        },
    )
    path = tmp_path / "dump.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config
    assert dump_config(load_config(path)) == dump_config(config)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_resolves_and_survives_a_dump(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    dump = tmp_path / "dump.yaml"
    dump.write_text(dump_config(config), encoding="utf-8")
    assert load_config(dump) == config


def test_a_configuration_cannot_be_changed() -> None:
    config = _resolve()
    for section in (config, config.train, config.reward.overlong):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, next(iter(type(section).model_fields)), None)
    assert hash(config) == hash(_resolve())


@pytest.mark.parametrize("key", LEAVES)
def test_every_key_declares_a_description_bounds_and_volatility(key: str) -> None:
    section, field = LEAVES[key]
    assert is_volatile(section, key.rsplit(".", 1)[-1]) in (True, False)
    assert field.description is not None
    assert field.description.endswith(".")
    types = getattr(field.annotation, "__args__", (field.annotation,))
    if int in types or float in types:
        bounds = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt)
        assert any(isinstance(bound, bounds) for bound in field.metadata)


def test_result_values_omit_only_volatile_keys() -> None:
    values = result_values(_resolve())
    for key, (section, _) in LEAVES.items():
        *sections, name = key.split(".")
        held = functools.reduce(lambda tree, part: tree.get(part, {}), sections, values)
        assert (name in held) is not is_volatile(section, name)
    assert values["train"]["total_steps"] == 200


def _names_read() -> set[str]:
    """Names read as attributes anywhere in the sources but the declarations, their checks and
    derived numbers.

    interop reads a recipe as a tree, by text.
    """
    names = set()
    for package in ("dapo_core", "tasks", "flows", "eval", "interop"):
        for path in (ROOT / package).rglob("*.py"):
            if path.parent == ROOT / "dapo_core" / "config" or path.name == "config.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
                if (
                    package == "interop"
                    and isinstance(node, ast.Constant)
                    and isinstance(node.value, str)
                ):
                    names.add(node.value.rpartition(".")[2])
    return names


@pytest.mark.slow
def test_every_key_is_read_somewhere() -> None:
    chain = ast.parse((ROOT / "tasks/chain.py").read_text(encoding="utf-8"))
    stages = {
        node.name
        for node in chain.body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }
    # stage_task reads the limit by the stage's name
    names = _names_read() | {f"{stage}_hours" for stage in stages}
    names |= {"preset"}  # of rollout_correction: sets its other keys
    unread = [key for key in LEAVES if key.rsplit(".", 1)[-1] not in names]
    assert not unread


def test_benchmarks_inherit_unset_values_from_the_section() -> None:
    sampled = {"set": "aime24", "num_samples": 4, "temperature": 0.6}
    sets = ["math500", sampled, "hf:you/geometry-set@main/", "own/held.parquet"]
    evaluate = _resolve(evaluate={"benchmarks": sets, "gates": ["math500 >= before - 1"]}).evaluate
    labels = [one.label for one in evaluate.benchmarks]
    assert labels == ["math500", "aime24", "geometry-set", "held"]
    aime = evaluate.of(evaluate.benchmarks[1])
    assert (aime.num_samples, aime.temperature) == (4, 0.6)
    assert aime.max_response_tokens == evaluate.max_response_tokens
    # A benchmark of a suite has the key of the same benchmark asked alone.
    alone = _resolve(evaluate={"num_samples": 4, "temperature": 0.6}).evaluate
    assert result_values(aime) == result_values(alone)
    with pytest.raises(ConfigError, match=r"no benchmark aime; it has math500, pooled"):
        _resolve(evaluate={"benchmarks": "math500", "gates": ["aime > before"]})
