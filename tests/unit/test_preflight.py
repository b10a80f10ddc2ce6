"""Findings before any stage: what a recipe is refused for or warned of, and the key to change."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_core.errors import ModelError
from dapo_core.machine import versions
from dapo_core.machine.device import Cpu, Cuda
from dapo_core.model.folder import INDEX_FILE, SINGLE_FILE
from dapo_core.training import train
from eval.report.gates import LAST_NIGHT
from flows.config import Config, resolve_config
from tasks.preflight import inputs
from tasks.preflight.finding import FAIL, OK, WARN, Finding, PreflightError
from tasks.preflight.model import turn_end
from tasks.preflight.prompts import asked_forms
from tasks.preflight.run import examine, require_ready
from tests.tiny_models import build_adapter, build_tiny, tiny_tokenizer
from tests.tiny_vision import build_tiny_vision, write_picture

Alter = Callable[[Path], object]
LENGTHS: dict[str, dict[str, Any]] = {
    "data": {"max_prompt_tokens": 160},
    "rollout": {"max_response_tokens": 64},
    "reward": {"overlong": {"buffer_tokens": 16}},
    "evaluate": {"max_response_tokens": 64},
    "serve": {"max_model_len": 256, "memory_gigabytes": 0.5, "eager": True},
}
ASK_BOX = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("preflight") / "llama", "llama")


def write_training(
    path: Path, ask: str = ASK_BOX, source: str = "exact", golds: Sequence[str] = "123456"
) -> Path:
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"What is {gold} + 0?{ask}"}],
            "reward_model": {"ground_truth": gold},
            "extra_info": {"index": str(number)},
        }
        for number, gold in enumerate(golds)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def recipe(
    folder: Path, model: Path, rows: Path | None = None, **sections: Mapping[str, Any]
) -> Config:
    """A valid recipe of local files, with the given changes."""
    held_out = folder / "eval.jsonl"
    if not held_out.exists():
        asked = [
            {"problem": f"Find {n} + 1.", "answer": str(n + 1), "unique_id": str(n)}
            for n in range(4)
        ]
        held_out.write_text("".join(json.dumps(row) + "\n" for row in asked))
    files = {"train": str(rows or write_training(folder / "train.parquet")), "eval": str(held_out)}
    values: dict[str, Any] = {name: dict(section) for name, section in LENGTHS.items()}
    values |= {"store": {"path": str(folder / "store")}, "model": {"path": str(model)}}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    values["data"] = {**values["data"], **files, **sections.get("data", {})}
    return resolve_config(values)


def altered(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the model with other values in config.json."""
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def found(config: Config, status: str) -> list[Finding]:
    return [finding for finding in examine(config) if finding.status == status]


def test_a_valid_recipe_passes_and_says_what_was_checked(tmp_path: Path, model: Path) -> None:
    findings = examine(recipe(tmp_path, model))
    assert {finding.status for finding in findings} == {OK}
    said = {finding.check: finding.found for finding in findings}
    assert said["model"].endswith("of llama, trainable; chat template present")
    assert said["lengths"].endswith("the model has 512 positions")
    assert "as \\boxed{}" in said["scorer"]
    assert "training asks for \\boxed{}" in said["prompts"]
    assert not (tmp_path / "store").exists()


def test_all_faults_are_reported_at_once_with_keys_that_fit(tmp_path: Path, model: Path) -> None:
    """No chat template, too long for the model, and no scorer: one error with all three."""
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    train = write_training(tmp_path / "t.parquet", source="exam")
    config = recipe(tmp_path, bare, train, serve={**LENGTHS["serve"], "max_model_len": 22528})
    with pytest.raises(PreflightError, match=r"^3 findings would end this run") as caught:
        require_ready(config)
    faults = ("has no chat template", "--set serve.max_model_len=512", "'exam' has no scorer")
    assert [words for words in faults if words not in str(caught.value)] == []


def test_the_first_problems_of_a_large_set_are_checked(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_BYTES", 1000)
    monkeypatch.setattr(inputs, "NUM_FIRST", 3)
    (tmp_path / "rows").mkdir()
    write_training(tmp_path / "rows/a.parquet", source="exam")
    config = recipe(tmp_path, model, tmp_path / "rows")
    [later] = [finding for finding in found(config, OK) if finding.check == "later"]
    assert "the rows of rows after the first 3" in later.found
    (finding,) = found(config, FAIL)
    assert "data_source 'exam' has no scorer" in finding.found


def test_a_base_model_passes_with_a_chat_template_of_its_own(tmp_path: Path, model: Path) -> None:
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    template = (bare / "chat_template.jinja").rename(tmp_path / "mine.jinja")
    config = recipe(tmp_path, bare)
    own = config.model.model_copy(update={"chat_template": str(template)})
    config = config.model_copy(update={"model": own})
    assert not found(config, FAIL)
    template.unlink()
    [finding] = found(config, FAIL)
    assert "mine.jinja cannot be read" in finding.found


def test_responses_that_would_run_past_the_end_of_a_turn_are_found(
    tmp_path: Path, model: Path
) -> None:
    """The base model ends a text with <|pad|>, the chat template a turn with <|end|>."""
    base = altered(model, tmp_path / "base", eos_token_id=0)
    (base / "generation_config.json").write_text('{"eos_token_id": [0]}')
    config = recipe(tmp_path, base)
    [warning] = found(config, WARN)
    assert "ends a turn with <|end|>, but a response ends only with <|pad|>" in warning.found
    assert warning.advice == "set model.stop_tokens=['<|end|>']"
    stopping, misspelt = (
        config.model_copy(update={"model": config.model.model_copy(update={"stop_tokens": tokens})})
        for tokens in (("<|end|>",), ("<|edn|>",))
    )
    assert found(stopping, WARN) == []
    [finding] = found(misspelt, FAIL)
    assert "'<|edn|>' is not a token of the model (did you mean <|end|>" in finding.found


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n<|end|>\n{% endfor %}", 1),
        ("{% for m in messages %}<|user|>{{ m.content }}<|pad|><|end|>{% endfor %}", 0),
        ("{% for m in messages %}{{ m.content }}\n\n{% endfor %}", None),  # no special token
        ("{{ messages[0].content }}<|end|>", None),  # no assistant's message
        ("{{ raise_exception('roles must alternate') }}", None),
        ("{{ messages.no.such.thing }}", None),
    ],
)
def test_the_token_after_an_assistants_turn_is_read_from_the_template(
    template: str, end: int | None
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert turn_end(tokenizer, {}) == end


def test_a_prompt_longer_than_its_limit_is_found_and_the_proposed_keys_pass(
    tmp_path: Path, model: Path
) -> None:
    train = write_training(tmp_path / "t.parquet", golds=["1", "2" * 100])
    config = recipe(tmp_path, model, train)
    (finding,) = found(config, FAIL)
    assert "data.max_prompt_tokens=160 is below the longest prompt" in finding.found
    changes = dict(word.split("=") for word in finding.advice.split(" --set ")[1:])
    lengths = {key.split(".")[0]: {key.split(".")[1]: int(value)} for key, value in changes.items()}
    assert found(recipe(tmp_path, model, train, **lengths), FAIL) == []


def test_every_token_of_a_picture_counts_in_the_lengths_of_prompts(tmp_path: Path) -> None:
    """A picture of 128 x 128 pixels has 64 tokens, in the text it is one."""
    vision = build_tiny_vision(tmp_path / "vision")
    write_picture(tmp_path / "a.png", 128, 128)
    asked = {"images": ["a.png"], "problem": "<image>What is the value of x?", "answer": "3"}
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(asked | {'id': n})}\n" for n in range(100)))
    (tmp_path / "eval.jsonl").write_text(json.dumps(asked | {"problem": "<image>And y?"}))
    passed = {each.check: each.found for each in examine(recipe(tmp_path, vision, rows))}
    trained, evaluated = map(int, re.findall(r"up to (\d+)", passed["lengths"]))
    assert 64 < evaluated < trained < 160
    assert (
        passed["later"]
        == "checked after the first two stages: the pictures of 50 training problems"
    )
    for too_long, is_refused in (("error", True), ("truncate_left", True), ("drop", False)):
        limits = {"max_prompt_tokens": trained - 1, "too_long": too_long}
        faults = found(recipe(tmp_path, vision, rows, data=limits), FAIL)
        fitting = [f"these fit together: --set data.max_prompt_tokens={trained}"] * is_refused
        assert [fault.advice for fault in faults] == fitting


def test_pictures_need_a_model_that_reads_them(tmp_path: Path, model: Path) -> None:
    write_picture(tmp_path / "a.png")
    row = {"images": "a.png", "problem": "<image>What is x?", "answer": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (finding,) = found(recipe(tmp_path, model, tmp_path / "rows.jsonl"), FAIL)
    assert "the problems have pictures, but the model" in finding.found
    row["images"] = "lost.png"
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (finding,) = found(recipe(tmp_path, model, tmp_path / "rows.jsonl"), FAIL)
    assert "none of 1 problem with pictures can be used (first: a picture file" in finding.found
    row["images"] = "http://127.0.0.1:9/a.png"  # on no server: its picture is left to prepare-data
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert found(recipe(tmp_path, model, tmp_path / "rows.jsonl"), FAIL) == []


def test_the_longest_benchmark_with_its_answer_must_fit(tmp_path: Path, model: Path) -> None:
    long = tmp_path / "long.json"
    long.write_text(json.dumps([{"problem": f"Find {'9' * 120} + 1.", "answer": "1"}]))
    short = {"set": str(tmp_path / "eval.jsonl"), "name": "short", "max_response_tokens": 90}
    assert not found(recipe(tmp_path, model, evaluate={"benchmarks": [short]}), FAIL)
    benchmarks = [short, {"set": str(long), "max_response_tokens": 80}]
    (finding,) = found(recipe(tmp_path, model, evaluate={"benchmarks": benchmarks}), FAIL)
    assert "long.max_response_tokens=80 is above serve.max_model_len=256" in finding.found
    assert "--set serve.max_model_len=" in finding.advice


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"},
            "multimodal",
        ),
        (
            {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"},
            "model.trust_remote_code=true",
        ),
        ({"model_type": "gpt_neox_japanese"}, "does not support custom attention"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    tmp_path: Path, model: Path, config: dict[str, Any], said: str
) -> None:
    other = altered(model, tmp_path / "other", **config)
    if "auto_map" in config:
        (other / "own.py").write_text("raise SystemExit('ran')")
    [finding] = [one for one in found(recipe(tmp_path, other), FAIL) if one.check == "model"]
    assert said in finding.found


def _tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Alter:
    """Replace the tensors of model.safetensors."""

    def alter(folder: Path) -> None:
        path = folder / SINGLE_FILE
        tensors = {name: it.clone() for name, it in change(load_file(path)).items()}
        save_file(tensors, path, metadata={"format": "pt"})

    return alter


def _config(**values: Any) -> Alter:
    def alter(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return alter


def _text(name: str, text: str) -> Alter:
    return lambda folder: (folder / name).write_text(text)


def _renamed(old: str, new: str) -> Alter:
    return lambda folder: (folder / old).rename(folder / new)


def _split(folder: Path) -> None:
    """Write two shards without an index."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:9], names[9:]), 1):
        shard = folder / f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, shard)


def _without_a_shard(folder: Path) -> None:
    _split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _stale_index(folder: Path) -> None:
    names = [*load_file(folder / SINGLE_FILE), "model.layers.9.mlp.up_proj.weight"]
    index = {"weight_map": dict.fromkeys(names, SINGLE_FILE)}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def _pickled(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE_FILE), folder / "pytorch_model.bin")
    (folder / SINGLE_FILE).unlink()


def _dangling(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / SINGLE_FILE).symlink_to("a blob that was removed")


def _awq(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors.pop(name).shape
        name = name.removesuffix("weight")
        tensors[f"{name}qweight"] = torch.zeros(columns, rows // 8, dtype=torch.int32)
        tensors[f"{name}scales"] = torch.ones(1, rows, dtype=torch.float16)
    return tensors


def _fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    matrices = {name: it for name, it in tensors.items() if name.endswith("proj.weight")}
    return tensors | {name: it.to(torch.float8_e4m3fn) for name, it in matrices.items()}


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n"
NAMES = "do not have the same tensors"
FOLDERS: dict[str, tuple[Alter, str]] = {
    "quantized": (_config(quantization_config={"quant_method": "awq"}), "config.json: awq"),
    "quantized, odd": (_config(quantization_config="awq"), "quantization_config in config.json"),
    "quantized, old": (_config(compression_config={"format": "int"}), "compression_config"),
    "awq tensors": (_tensors(_awq), "14 of its 34 tensors, such as model.layers.0.mlp.down_proj.q"),
    "fp8 tensors": (_tensors(_fp8), "14 of its 20 tensors, .* are F8_E4M3; set model.path to the"),
    "adapter": (_text("adapter_config.json", "{}"), "merge the adapter into the model"),
    "reward model": (
        _config(architectures=["LlamaForSequenceClassification"]),
        "is a LlamaForSequenceClassification .* does not generate text",
    ),
    "value head": (
        _tensors(lambda it: it | {"v_head.summary.weight": torch.ones(1, 64)}),
        rf"{NAMES} .*not in the model: 1 \(v_head.summary.weight\)\)",
    ),
    "wrapped": (
        _tensors(lambda it: {f"module.{name}": each for name, each in it.items()}),
        rf"{NAMES}.*not in the model: 20 \(module\..* saved in a wrapper",
    ),
    "images": (
        _tensors(lambda it: it | {"visual.proj.weight": torch.ones(1, 64)}),
        rf"{NAMES} .*not in the model: 1 \(visual.proj.weight\)\); the weights are of a multimodal",
    ),
    "no head": (_config(tie_word_embeddings=False), "set tie_word_embeddings=true in config.json"),
    "layers": (_config(num_hidden_layers=4), r"not in the files: 18 \(model.layers.2"),
    "sizes": (_config(vocab_size=400), r"has shape \[313, 64\], but the model needs \[400, 64\]"),
    "class": (_config(architectures=["Qwen3ForCausalLM"]), "builds a LlamaForCausalLM"),
    "no class": (_config(architectures=None), r'such as \["Qwen3ForCausalLM"\]'),
    "shards": (_split, f"2 files without {INDEX_FILE}.*dapo merge"),
    "lost shard": (_without_a_shard, "lacks 1 of its 2 weight files, such as model-00002-of-00002"),
    "stale index": (_stale_index, "lists 1 tensor that its files lack, such as model.layers.9"),
    "odd name": (_renamed(SINGLE_FILE, "weights.safetensors"), "rename the file"),
    "pickled": (_pickled, "its weights are pickled, .* load and save_pretrained it"),
    "dangling": (_dangling, r"model.safetensors is a link to .*, which does not exist"),
    "no weights": (_tensors(lambda it: {}), "contain no tensors"),
    "pointer": (_text(SINGLE_FILE, POINTER), "1 Git LFS pointer .* such as model.safetensors"),
    "small pointer": (_text("tokenizer.json", POINTER), "1 Git LFS pointer .* tokenizer.json"),
    "dtype": (_config(dtype="auto"), "dtype='auto'; write the dtype of the weights: bfloat16"),
    "heads": (_config(num_attention_heads="2"), "cannot read: .*num_attention_heads.* got str"),
    "no layers": (_config(num_hidden_layers=0), "not in the model: 18"),
    "activation": (_config(hidden_act="wow"), "cannot be loaded .* KeyError: 'wow'"),
    "rope": (_config(rope_parameters={"rope_type": "wow"}), "cannot be loaded .* KeyError: 'wow'"),
    "nested": (_text("config.json", "[" * 100_000), "config.json cannot be read"),
    "tokenizer": (_text("tokenizer.json", '{"model": 3}'), "has no readable tokenizer"),
    "tokens": (_text("tokenizer_config.json", "[]"), "has no readable tokenizer"),
    "end": (_text("generation_config.json", '{"eos_token_id": "x"}'), "has eos_token_id='x'"),
}


@pytest.mark.parametrize(("alter", "said"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_that_training_would_reject_is_named_before_a_run(
    tmp_path: Path, model: Path, alter: Alter, said: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "other"))
    alter(folder)
    [finding] = found(recipe(tmp_path, folder), FAIL)
    assert re.search(said, finding.found)
    assert len(finding.message) < 900


def test_training_refuses_a_folder_in_the_words_of_the_preflight(
    tmp_path: Path, model: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "other"))
    _tensors(lambda it: it | {"visual.proj.weight": torch.ones(1, 64)})(folder)
    config = recipe(tmp_path, folder)
    [finding] = found(config, FAIL)
    with pytest.raises(ModelError, match=f"^{re.escape(finding.found)}$"):
        train(config, tmp_path / "train.parquet", folder, tmp_path / "output")


def test_an_adapter_is_checked_on_its_base_and_a_missing_base_is_named(
    tmp_path: Path, model: Path
) -> None:
    base = shutil.copytree(model, tmp_path / "base")
    config = recipe(tmp_path, build_adapter(tmp_path / "adapter", base, "q_proj"))
    assert found(config, FAIL) == []
    base.rename(tmp_path / "moved")
    (failure,) = found(config, FAIL)
    assert failure.check == "model"
    assert re.search(rf"adapter of the model {base}, but .* no such folder; name", str(failure))
    shutil.copytree(model, base)
    tensors = load_file(base / SINGLE_FILE)
    tensors["model.norm.weight"] += 1
    save_file(tensors, base / SINGLE_FILE, {"format": "pt"})
    (failure,) = found(config, FAIL)
    assert "was trained on another model than the one in" in str(failure)


def test_a_second_copy_of_the_weights_is_not_counted(tmp_path: Path, model: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "other"))
    shutil.copy(folder / SINGLE_FILE, folder / "consolidated.safetensors")
    findings = [one for one in examine(recipe(tmp_path, folder)) if one.check == "model"]
    [original] = [one for one in examine(recipe(tmp_path, model)) if one.check == "model"]
    assert [one.status for one in findings] == [OK, WARN]
    assert findings[0].found == original.found
    assert "holds consolidated.safetensors beside the weights" in findings[1].found


def test_a_reference_model_that_cannot_be_loaded_is_named_before_a_run(
    tmp_path: Path, model: Path
) -> None:
    reference = Path(shutil.copytree(model, tmp_path / "reference"))
    _tensors(_awq)(reference)
    kl = {"kl": {"place": "loss", "reference_path": str(reference)}}
    [finding] = found(recipe(tmp_path, model, algorithm=kl), FAIL)
    assert finding.check == "reference model"
    assert "is quantized" in finding.found


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "other", "llama", vocab_size=60)
    (finding,) = found(recipe(tmp_path, model), FAIL)
    assert "the model's embedding has 60 rows" in finding.found


def test_a_scorer_that_rejects_gold_answers_is_found(tmp_path: Path, model: Path) -> None:
    scorer = tmp_path / "reward.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
        "0.0\n"
    )
    (finding,) = found(recipe(tmp_path, model, custom_reward={"path": str(scorer)}), WARN)
    assert "custom_reward.path rejects all 3 gold answers" in finding.found
    scorer.write_text(scorer.read_text().replace("return 0.0", "raise KeyError('lost')"))
    (finding,) = found(recipe(tmp_path, model, custom_reward={"path": str(scorer)}), FAIL)
    assert "KeyError: 'lost'" in finding.found
    scorer.write_text("def score():\n    return 0.0\n")
    (finding,) = found(recipe(tmp_path, model, custom_reward={"path": str(scorer)}), FAIL)
    assert finding.check == "reward"


def test_a_scorer_that_ignores_the_form_that_prompts_ask_for_is_a_warning(
    tmp_path: Path, model: Path
) -> None:
    """A model that obeys the prompt would never get a reward."""
    train = write_training(tmp_path / "t.parquet", source="math_dapo")
    (finding,) = found(recipe(tmp_path, model, train, algorithm={"compat": "verl"}), WARN)
    assert finding.found == "prompts of math_dapo ask for \\boxed{}, but math_dapo reads Answer:"
    train = write_training(tmp_path / "t.parquet", source="openai/gsm8k")
    (finding,) = found(recipe(tmp_path, model, train), WARN)
    assert "gsm8k reads ####" in finding.found


def test_prompts_that_ask_for_another_form_than_the_evaluation_are_a_warning(
    tmp_path: Path, model: Path
) -> None:
    train = write_training(tmp_path / "t.parquet", ask="\nEnd with a line `Answer: $Answer`.")
    (finding,) = found(recipe(tmp_path, model, train), WARN)
    assert finding.check == "prompts"
    assert "training asks for Answer:" in finding.found
    assert "evaluation for \\boxed{}" in finding.found


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("put it in \\boxed{}", ["\\boxed{}"]),
        ("The last line is of the form Answer: $Answer (without quotes)", ["Answer:"]),
        ('output the final answer after "####".', ["####"]),
        ("What is 2 + 3?", []),
    ],
)
def test_the_answer_format_that_a_prompt_asks_for(text: str, forms: list[str]) -> None:
    assert asked_forms(text) == forms


def test_caches_devices_and_ports_are_checked_against_the_recipe(
    tmp_path: Path, model: Path
) -> None:
    serve = {**LENGTHS["serve"], "memory_gigabytes": 1e-6}
    config = recipe(tmp_path, model, serve=serve, train={"device": "cuda", "num_ranks": 1})
    said = {finding.check: f"{finding.found}; {finding.advice}" for finding in found(config, FAIL)}
    assert set(said) == {"cache", "devices"}
    # 2 layers x (keys + values) x 1 head of 32 numbers of 2 bytes = 256 bytes a token, 64 KiB for
    # 256
    assert "cannot hold a sequence of 256 tokens" in said["cache"]
    assert "--set serve.memory_gigabytes=0.1" in said["cache"]
    assert "torch" in said["devices"]


def test_shared_devices_count_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "require", lambda self: None)
    monkeypatch.setattr(Cuda, "visible", lambda self, environment: ["0", "1"])
    monkeypatch.setattr("tasks.preflight.machine.check_devices_here", lambda *_: None)

    def placed(placement: str) -> Config:
        train = {"device": "cuda", "device_model": "H100", "num_ranks": 2, "placement": placement}
        return recipe(tmp_path, model, train=train, rollout={"num_workers": 2})

    def said(status: str, placement: str) -> str:
        findings = found(placed(placement), status)
        return "; ".join(finding.found for finding in findings if finding.check == "devices")

    refused = said(FAIL, "separate")
    assert "train.num_ranks=2 + 2 for rollout.num_workers = 4 devices, but" in refused
    assert "let ranks and engines share (train.placement=colocated)" in refused
    assert said(OK, "colocated") == "2 of 2 cuda devices"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    failed = found(placed("colocated"), FAIL)
    [once] = [finding for finding in failed if "expandable_segments" in finding.found]
    assert once.found.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True: ")


def test_versions_that_form_no_known_set_are_a_warning(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = versions.sets()["npu-newest"].packages
    monkeypatch.setattr("tasks.preflight.machine.stack", lambda: {**newest, "torch": "2.9.1"})
    [finding] = [one for one in found(recipe(tmp_path, model), WARN) if one.check == "versions"]
    assert "npu-newest: torch 2.9.1 in place of 2.10.0" in finding.found
    monkeypatch.setattr("tasks.preflight.machine.stack", lambda: newest)
    assert "versions" not in {finding.check for finding in found(recipe(tmp_path, model), WARN)}


def test_a_tracker_without_its_client_is_reported(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str, *_: Any, find: Any = importlib.util.find_spec) -> Any:
        return None if name == "wandb" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    (finding,) = found(recipe(tmp_path, model, train={"trackers": ["wandb"]}), FAIL)
    assert "includes wandb, but the client is not installed: pip install wandb" in finding.found


@pytest.mark.slow
def test_a_ray_cluster_that_does_not_answer_is_found_before_the_training(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.preflight.cluster.CLUSTER_SECONDS", 0.01)
    config = recipe(tmp_path, model, train={"ray_address": "127.0.0.1:1"})
    for on_nodes in (False, True):
        [finding] = examine(config, on_nodes=on_nodes).failed
        assert "train.ray_address=127.0.0.1:1 did not answer within 0.01 s" in finding.found


def test_a_recipe_model_needs_generated_problems(tmp_path: Path, model: Path) -> None:
    """Other sets may be added to them."""
    own = str(write_training(tmp_path / "own.parquet"))
    values = recipe(tmp_path, model).model_dump() | {"model": {"source": "recipe"}}
    values["data"] |= {"train": own}
    [finding] = found(resolve_config(values), FAIL)
    assert "warmed up on generated problems" in finding.found
    values["data"] |= {"train": ["arithmetic", own]}
    assert found(resolve_config(values), FAIL) == []


def test_baselines_and_the_disk_space_of_kept_steps_are_checked(
    tmp_path: Path, model: Path
) -> None:
    entries = [
        {"name": "same", "path": str(model)},
        {"name": "gone", "path": str(tmp_path / "none")},
        {"name": "away", "base_url": "http://127.0.0.1:9", "model": "m"},
        {"name": LAST_NIGHT, "path": str(tmp_path / "lost")},
    ]
    sections: dict[str, Any] = {
        "evaluate": {"baselines": entries, "checkpoints": "every 2"},
        "checkpoint": {"save_every": 2},
    }
    config = recipe(tmp_path, model, train={"total_steps": 6}, **sections)
    about = {finding.check: finding for finding in examine(config)}
    assert about["baseline same"].status == OK
    assert about["baseline gone"].status == FAIL
    assert "correct or remove gone in evaluate.baselines" in about["baseline gone"].advice
    assert about["baseline away"].status == WARN
    assert "the run goes on without this column" in about["baseline away"].advice
    assert about[f"baseline {LAST_NIGHT}"].status == WARN
    assert "of them for 2 steps whose checkpoints are kept" in about["disk"].found


@pytest.mark.slow
def test_a_custom_grader_is_tried_before_a_run(tmp_path: Path, model: Path) -> None:
    def grader(**evaluate: Any) -> list[Finding]:
        findings = examine(recipe(tmp_path, model, evaluate=evaluate))
        return [one for one in findings if one.check in ("grader", "prompt") and one.status != OK]

    path = tmp_path / "score.py"
    path.write_text("def compute_score(**_):\n    raise KeyError('no such column')\n")
    [finding] = grader(scorer=str(path))
    assert finding.status == FAIL
    assert "KeyError: 'no such column'" in finding.found
    path.write_text("def compute_score(**_):\n    return 0.5\n")  # points, not verdicts
    [finding] = grader(scorer=str(path))
    assert (finding.status, "wrong" in finding.found) == (WARN, True)
    path.write_text("def compute_score(**_):\n    return 1\n")
    assert grader(scorer=str(path)) == []
    assert "is not a scorer, FILE.py or" in grader(scorer="math_verfy")[0].found


def test_a_training_that_cannot_fit_is_refused_with_numbers_and_keys(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 GiB, the processes alone take more: rank, engine, trainer, Ray and scorers."""
    monkeypatch.setattr(Cpu, "memory_bytes", lambda device: 2 * 1024**3)
    (finding,) = found(recipe(tmp_path, model), FAIL)
    assert finding.check == "memory"
    assert re.search(r"^the machine needs \d+\.\d GiB in phase \w+, but has 2\.0$", finding.found)
    assert "train.allow_oversubscription=true runs it anyway" in finding.advice
    (tried,) = found(recipe(tmp_path, model, train={"allow_oversubscription": True}), WARN)
    assert (tried.check, tried.found) == ("memory", finding.found)
    monkeypatch.setattr(Cpu, "memory_bytes", lambda device: None)
    (unknown,) = [one for one in examine(recipe(tmp_path, model)) if one.check == "memory"]
    assert (unknown.status, "set train.device_model" in unknown.found) == (OK, True)


def test_an_architecture_unknown_to_the_memory_plan_is_a_warning(
    tmp_path: Path, model: Path
) -> None:
    other = altered(model, tmp_path / "other", model_type="olmo2")
    [said] = [one for one in examine(recipe(tmp_path, other)) if one.check == "memory"]
    assert said.status == WARN
    assert "for model_type olmo2 (only for llama" in said.found
