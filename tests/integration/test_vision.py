"""Models that read pictures: ranks compute as transformers does one sequence at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch, build_batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.config.train import LoraConfig
from dapo_core.engines.factory import build_engine, engine_settings
from dapo_core.errors import ModelError, RolloutError
from dapo_core.machine.device import Cpu
from dapo_core.merge.run import merge_checkpoint
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.model.folder import SINGLE_FILE, read_config
from dapo_core.model.inputs import ImageReference, ModelInput
from dapo_core.model.lora import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    adapter_name,
    adapter_names,
    is_adapter,
    write_adapter,
)
from dapo_core.model.names import is_of_tower
from dapo_core.model.pictures import ImageProcessor
from dapo_core.model.pretrained import load_causal_lm
from dapo_core.policy.attention import Packing
from dapo_core.policy.log_probs import TokenLogProbs
from dapo_core.policy.packing import pack
from dapo_core.policy.rank import Policy
from dapo_core.policy.requirements import require_trainable
from dapo_core.policy.vision import Tower
from dapo_core.training import train
from durable import read_json_lines
from tests.batches import make_group
from tests.configs import make_config
from tests.in_process import without_ray
from tests.ranks import run_ranks
from tests.sent_weights import sent_weights
from tests.tiny_models import build_tiny
from tests.tiny_vision import FAMILIES, Family, build_tiny_vision, write_picture
from tests.trainings import World
from tests.trainings import config_of as config_of_recipe

TRAIN = {"num_ranks": 2, "train_prompts": 4, "mini_prompts": 4, "warmup_steps": 0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "sequence parallel": {"sequence_parallel": 2},
    "frozen": {"freeze": ["vision"]},
    "adapters": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
}
SPLITS = ("data parallel", "sequence parallel")  # other layouts are tested with one family
MAX_TOKENS = 32  # so that every rank has several micro-batches


@dataclass(frozen=True)
class Known:
    """Results of transformers, one sequence at a time."""

    log_probs: torch.Tensor  # [B, R], 0 where a response has no token
    gradients: dict[str, torch.Tensor]


# sizes of the pictures in each prompt: 6 tokens; none; 8 and 1 tokens; 1 token
PICTURES: list[list[tuple[int, int]]] = [[(32, 48)], [], [(64, 32), (16, 16)], [(16, 16)]]


def batch_of(folder: Path) -> Batch:
    """Return two responses to each of four prompts with pictures, which are beside the model."""
    config = read_config(folder)
    start, pad, end = (
        config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")
    )
    processor = ImageProcessor(folder)
    groups = []
    for index, sizes in enumerate(PICTURES):
        group = make_group([1.0, 1.0], index, [3 + index, 9 - 2 * index], seed=4)
        ids, images = [*group.prompt.input.token_ids], []
        for number, size in enumerate(sizes):
            path = write_picture(folder / f"{index}-{number}.png", *size, seed=10 * index + number)
            grid = processor.grid(path)
            num_tokens = processor.num_tokens(grid)
            images.append(ImageReference(str(path), grid, len(ids) + 1, num_tokens))
            ids += [start, *[pad] * num_tokens, end, 20 + index]
        prompt = replace(group.prompt, input=ModelInput(tuple(ids), tuple(images)))
        groups.append(replace(group, prompt=prompt))
    batch = build_batch(groups, mask_truncated=False)
    return replace(batch, advantages=torch.linspace(-2, 1.5, batch.num_responses))


def one_by_one(folder: Path, batch: Batch) -> Known:
    """Return the log-probs, and the gradients of a step in which old log-probs are the same."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    log_probs = torch.zeros(batch.response_mask.shape)
    loss = torch.zeros(())
    for row, (start, count) in enumerate(
        zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
    ):
        ids = batch.token_ids[row, : start + count].long().unsqueeze(0)
        pictures: dict[str, Any] = {}
        if batch.images is not None and batch.images[row]:
            pixels, grids = ImageProcessor(folder).pixels(batch.images[row])
            pictures = {"pixel_values": pixels, "image_grid_thw": grids}
            pictures["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        model.model.rope_deltas = None
        logits = model(input_ids=ids, use_cache=False, **pictures).logits[0, start - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, start:].unsqueeze(-1)).squeeze(-1)
        log_probs[row, :count] = chosen.detach()
        loss = loss - batch.advantages[row] * chosen.sum()
    (loss / batch.response_mask.sum()).backward()
    parameters = model.named_parameters()
    gradients = {n: each.grad for n, each in parameters if each.grad is not None}
    return Known(log_probs, gradients)


def config_of(folder: Path, **train: Any) -> Any:
    """Return a configuration whose update computes the gradients of one_by_one."""
    optional = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "dtype": "float32"}
    return make_config(
        folder, train={**TRAIN, **optional, **train}, rollout={"dtype": "float32", "group_size": 2}
    )


def _update(
    rank: int, folder: Path, batch: Batch, layouts: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return what each layout's ranks compute in an update, and the weights before and after."""
    results = {}
    for name in layouts:
        config = config_of(folder, **LAYOUTS[name])
        policy = Policy(folder, config)
        before = sent_weights(policy)
        sp = config.train.sequence_parallel
        shares, indices = split_batch(batch, config.train.num_data_ranks, MAX_TOKENS * sp)
        share = shares[rank // sp]
        parts = range(len(share.micro_batches))
        log_probs = policy.log_probs(share).log_probs
        parameters: dict[str, Any] = dict(policy._causal_lm().named_parameters())
        adapters = {
            n: each.full_tensor().clone() for n, each in parameters.items() if is_adapter(n)
        }
        policy.update(share, LossTotals.of(batch, config.train.num_data_ranks))
        results[name] = {
            "before": before,
            "after": sent_weights(policy),
            "log_probs_after": policy.log_probs(share).log_probs,
            "adapters": adapters,
            "rows": indices[rank // sp],
            "shown": [any(part.images or ()) for part in map(share.micro_batch, parts)],
            "log_probs": log_probs,
            "gradients": {
                name: each.grad.full_tensor()
                for name, each in parameters.items()
                if each.grad is not None
            },
            "moments": {n for n, each in parameters.items() if each in policy.optimizer.state},
        }
    return results


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    parent = tmp_path_factory.mktemp("models")
    return {name: build_tiny_vision(parent / name, name, seed=3) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_as_transformers_does_one_sequence_at_a_time(
    folders: dict[Family, Path], family: Family
) -> None:
    folder = folders[family]
    stored, batch = load_file(folder / SINGLE_FILE), batch_of(folder)
    known = one_by_one(folder, batch)
    layouts = LAYOUTS if family == "qwen3_vl_moe" else SPLITS
    ranks = run_ranks(2, _update, folder, batch, [*layouts])
    shown = [rank["data parallel"]["shown"] for rank in ranks]
    assert any(first != second for first, second in zip(*shown, strict=True))  # one has no picture
    for layout in layouts:
        options = LAYOUTS[layout]
        first, second = (rank[layout] for rank in ranks)
        assert len(first["shown"]) > 1
        for result in (first, second):
            expected = known.log_probs[result["rows"], : result["log_probs"].shape[1]]
            torch.testing.assert_close(result["log_probs"], expected, rtol=0, atol=1e-5)
        is_trained = {name: not is_of_tower(name) or "freeze" not in options for name in stored}
        if "lora" not in options:
            assert first["before"].keys() == {name for name in stored if is_trained[name]}
            assert all(torch.equal(each, stored[name]) for name, each in first["before"].items())
        assert first["moments"] == first["gradients"].keys()
        for name, gradient in first["gradients"].items():
            assert not (is_of_tower(name) and {"freeze", "lora"} & options.keys())
            expected = _expected(name, gradient, known.gradients, first["adapters"])
            scale = max(expected.abs().max().item(), 1e-6)
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-5 * scale, msg=name)
        _require_engine(folder, options, batch, [first, second])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fault_in_positions_packing_or_pixels_would_show(
    folders: dict[Family, Path], family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone moves log-probs by more than 0.5, so equality to 1e-5 excludes it."""
    folder = folders[family]
    batch = batch_of(folder)
    causal_lm = load_causal_lm(folder, torch.float32)
    tower = Tower(causal_lm, folder)
    model = TokenLogProbs(causal_lm, chunk_tokens=8, tower=tower)
    row = pack(batch, torch.device("cpu"))
    as_text = pack(replace(batch, images=None), torch.device("cpu"))
    num_tokens = row.token_ids.shape[1]
    faults = {
        "positions": replace(row, position_ids=as_text.position_ids),
        "packing": replace(row, packing=Packing([num_tokens], torch.device("cpu"))),
    }
    with torch.no_grad():
        right = model(row, 1.0, False)[0]
        wrong = {name: model(faulty, 1.0, False)[0] for name, faulty in faults.items()}
        read = tower._pixels

        def black(images: Any) -> tuple[torch.Tensor, torch.Tensor]:
            pixels, grids = read(images)
            return torch.zeros_like(pixels), grids

        monkeypatch.setattr(tower, "_pixels", black)
        wrong["pixels"] = model(row, 1.0, False)[0]
    known = one_by_one(folder, batch).log_probs.flatten()[row.cells]
    torch.testing.assert_close(right, known, rtol=0, atol=1e-5)
    assert [name for name, each in wrong.items() if (each - right).abs().max() < 0.5] == []


def _expected(
    name: str,
    gradient: torch.Tensor,
    known: dict[str, torch.Tensor],
    adapters: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return a parameter's gradient; of a new adapter, whose B is 0, those of A are 0."""
    if ".lora_B." not in name:
        return known.get(name, torch.zeros_like(gradient))
    of_weight = known[name.replace(".lora_B.default", "")]
    scale = LoraConfig(**LAYOUTS["adapters"]["lora"]).scale
    return scale * of_weight @ adapters[name.replace("lora_B", "lora_A")].T


def _require_engine(
    folder: Path, options: dict[str, Any], batch: Batch, ranks: list[dict[str, Any]]
) -> None:
    """An engine with the sent weights has the ranks' log-probs."""
    settings = engine_settings(config_of(folder, **options), Cpu())
    engine = build_engine("hf", folder, settings, seed=0)
    engine.load_weights(ranks[0]["after"].items(), 1)
    for result in ranks:
        for row, values in zip(result["rows"], result["log_probs_after"], strict=True):
            if batch.images is not None and batch.images[row]:
                continue  # this engine reads none
            start, count = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
            ids = batch.token_ids[row].tolist()
            sequence = ModelInput(tuple(ids[:start])), ids[start : start + count]
            [given] = engine.log_probs([sequence])
            expected = values[:count]
            torch.testing.assert_close(torch.tensor(given), expected, rtol=0, atol=1e-4)
    if "freeze" in options:
        with pytest.raises(RolloutError, match=r"tensors are missing: .*visual"):
            build_engine("hf", folder, replace(settings, freezes_tower=False), 0).load_weights(
                ranks[0]["after"].items(), 1
            )


def test_a_text_model_has_no_tower_to_freeze(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, "qwen3")
    with pytest.raises(ModelError, match="qwen3 has no vision tower; remove the key"):
        require_trainable(config_of(folder, freeze=["vision"]), folder)


def test_a_model_that_reads_pictures_trains_on_texts(
    world: World, folders: dict[Family, Path], tmp_path: Path
) -> None:
    """With a frozen tower, through draw, update, synchronization and checkpoint, then merged."""
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str) % 3, 'acc': 0}\n"
    )
    train_config = {"num_ranks": 1, "total_steps": 2, "freeze": ["vision"], "mini_prompts": 4}
    config = config_of_recipe(train=train_config, custom_reward={"path": str(scorer)})
    folder = folders["qwen2_5_vl"]
    with without_ray():
        train(config, world.data, folder, tmp_path / "run")
    for line in read_json_lines(tmp_path / "run" / METRICS_FILE):
        assert line["weight_sync/probe_difference"] < 1e-4
        assert line["actor/grad_norm"] > 0
    merge_checkpoint([tmp_path / "run"], tmp_path / "merged")
    before, after = (load_file(path / SINGLE_FILE) for path in (folder, tmp_path / "merged"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == set(filter(is_of_tower, before))


def test_an_adapter_of_the_language_model_is_merged_into_the_weights_of_the_files(
    folders: dict[Family, Path], tmp_path: Path
) -> None:
    """Adapters have the modules' names, and the files of Qwen2.5-VL others."""
    base, lora = folders["qwen2_5_vl"], LoraConfig(rank=2, targets=("q_proj",))
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    changed = load_file(base / SINGLE_FILE)
    for layer in range(2):
        module = f"layers.{layer}.self_attn.q_proj.weight"
        names = [adapter_name(n) for n in adapter_names(f"model.language_model.{module}")]
        first, second = (torch.randn(shape, generator=draw) for shape in ((2, 128), (128, 2)))
        tensors |= dict(zip(names, (first, second), strict=True))
        changed[f"model.{module}"] += lora.scale * second @ first
    write_adapter(tmp_path / "adapter", tensors, lora, base)
    merge_checkpoint([tmp_path / "adapter"], tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / SINGLE_FILE)
    assert merged.keys() == changed.keys()
    for name, tensor in changed.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-6)
    written = load_file(tmp_path / "merged" / ADAPTER_FOLDER / ADAPTER_FILE)
    assert written.keys() == tensors.keys()
