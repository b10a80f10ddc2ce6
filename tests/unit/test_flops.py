"""FLOPs of a training step against PyTorch's counter, device peaks, and utilization."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dapo_core.algorithm.batch import build_batch
from dapo_core.machine.device import Device, device_for, peak_flops
from dapo_core.memory.tower import LANGUAGE_MODELS
from dapo_core.metrics.flops import ActorUtilization, tower_flops, training_flops
from dapo_core.model.inputs import ImageReference
from tests.batches import make_group
from tests.tiny_vision import FAMILIES, Family, build_tiny_vision

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Of three layers the middle one is sparse: a router, and 2 of 6 experts for each token.
EXPERTS: dict[str, Any] = {
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0, 2],
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),  # head_dim 24 / 4 = 6
    "llama, one key per query": LlamaConfig(**SIZES | {"num_key_value_heads": None}),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=10),  # heads wider than the model
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3_moe, every second layer": Qwen3MoeConfig(
        **SIZES, **EXPERTS | {"mlp_only_layers": [], "decoder_sparse_step": 2}
    ),
}
BATCH: Any = SimpleNamespace(
    lengths=np.array([2, 3]),
    prompt_lengths=torch.tensor([0, 1]),
    response_lengths=torch.tensor([2, 2]),
    prompt_owners=np.array([0, 1]),
    num_responses=2,
    images=None,
)
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def tiny(config: PretrainedConfig) -> torch.nn.Module:
    """Random weights; attention and experts are plain matrix products, which the counter sees."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )


def flops(config: PretrainedConfig, lengths: list[int], num_logits: int) -> float:
    number = training_flops(config, np.array(lengths), num_logits)
    assert number is not None
    return number


def test_matches_hand_computed_values() -> None:
    # Qwen3, weights a token meets: 3 x (q 24 x 40 + k, v 2 x 24 x 20 + out 40 x 24 + MLP 3 x 24 x
    # 40) = 17,280 pairs of lengths 2 and 3: 3 + 6 = 9, each 3 layers x 4 heads x 10 wide x 2
    # products = 240: 2,160 head of 4 positions: 4 x 24 x 50 = 4,800; 3 passes x 2 x (17,280 x 5 +
    # 2,160 + 4,800) = 560,160
    assert flops(CONFIGS["qwen3"], [2, 3], 4) == 560_160
    # The sparse layer: router 24 x 6 + 2 experts x 3 x 24 x 12 = 1,872 instead of an MLP of 2,880
    # projections 24 x 8 x (2 x 4 + 2 x 2) = 2,304; 3 x 2,304 + 2 x 2,880 + 1,872 = 14,544; 6 x
    # 14,544 = 87,264 one token: itself, 3 layers x 4 x 8 x 2 = 192; 6 x 192 = 1,152; no head
    assert flops(CONFIGS["qwen3_moe"], [1], 0) == 87_264 + 1_152


@each_config
def test_a_backward_pass_costs_two_forward_passes(config: PretrainedConfig) -> None:
    model, length = tiny(config), 7
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    counts = counter.get_flop_counts()
    # transformers 5.5 makes the angles of positions by a product of matrices, which no weight is
    # part of
    angles = sum(sum(part.values()) for name, part in counts.items() if name.endswith("rotary_emb"))
    # else it alone has batches of matrices
    attention = counts["Global"][torch.ops.aten.bmm] - angles
    # eager attention multiplies all 7 x 7 pairs, of which causal attention needs 7 x 8 / 2
    needed = counter.get_total_flops() - angles - attention * 3 / 7
    assert needed == flops(config, [length], length)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_of_a_tower_matches_the_counter(family: Family, tmp_path: Path) -> None:
    folder = build_tiny_vision(tmp_path, family)
    eager: Any = {"attn_implementation": "eager"}
    model = AutoModelForImageTextToText.from_pretrained(folder, **eager)
    grids = [(1, 8, 12), (1, 4, 4)]  # whole windows of 4 x 4 patches
    pixels = torch.randn(112, 3 * 2 * 8 * 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = model.model.visual(pixels, grid_thw=torch.tensor(grids), return_dict=True)
        assert counter.get_total_flops() == tower_flops(model.config, grids, is_trained=False)
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
        torch.stack([part.sum() for part in parts]).sum().backward()
    assert counter.get_total_flops() == tower_flops(model.config, grids, is_trained=True)
    text, kind = model.config.get_text_config().to_dict(), LANGUAGE_MODELS[family]
    del text["model_type"], text["rope_parameters"]
    alone = AutoConfig.for_model(kind, **text)
    assert flops(model.config, [7], 3) == flops(alone, [7], 3)


def test_a_picture_counts_once_in_utilization_although_siblings_show_it(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(build_tiny_vision(tmp_path))
    image = ImageReference("a.png", (1, 4, 6), 1, 6)
    pictured: Any = SimpleNamespace(**{**vars(BATCH), "images": [(image,), (image,)]})
    device = "NVIDIA A100-SXM4-80GB", torch.bfloat16, 1
    for trains_tower in (True, False):
        meter = ActorUtilization(config, *device, trains_tower=trains_tower)
        [shown, texts] = (meter.metrics(each, 1.0)["perf/mfu/actor"] for each in (pictured, BATCH))
        added = tower_flops(config, [(1, 4, 6)], trains_tower)
        assert (shown - texts) * 312e12 == pytest.approx(added, rel=1e-6)


def test_unknown_architectures_have_no_flops() -> None:
    assert training_flops(GPT2Config(), np.array([4]), 4) is None
    window = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=2)
    assert training_flops(window, np.array([4]), 4) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Ascend910B2", 353.8944e12),  # 24 cores x 8,192 operations x 1.8 GHz
        ("Ascend910B3", 294.912e12),  # 20 x 8,192 x 1.8 GHz
        ("Ascend910_9392", 363.7248e12),  # 24 x 8,192 x 1.85 GHz
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_known_devices_have_their_vendors_peak(name: str, peak: float | None) -> None:
    assert peak_flops(name) == (None if peak is None else pytest.approx(peak, rel=1e-12))


def test_mfu_is_flops_over_time_and_peak(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        meter = ActorUtilization(
            CONFIGS["qwen3"], "NVIDIA A100-SXM4-80GB", torch.bfloat16, num_devices=4
        )
    assert caplog.messages == []
    # 560,160 operations in 1 us on 4 x 312e12 FLOP/s: 560,160 / 1.248e9
    metrics = meter.metrics(BATCH, 1e-6)
    assert metrics == {"perf/mfu/actor": pytest.approx(4.4885e-4, rel=1e-4)}


def test_a_prompt_that_siblings_share_counts_once_in_utilization() -> None:
    config = CONFIGS["qwen3"]
    meter = ActorUtilization(config, "NVIDIA A100-SXM4-80GB", torch.bfloat16, num_devices=1)
    batch = build_batch([make_group([1.0, 0.0], 0, [3, 4], num_prompt_tokens=5)], False)
    # the second response of 4 tokens, without the 5 of the prompt before it
    needed = flops(config, [8, 9], 7) - flops(config, [5], 0)
    assert meter.metrics(batch, 1.0) == {"perf/mfu/actor": pytest.approx(needed / 312e12)}


@pytest.mark.parametrize(
    ("config", "device", "dtype", "reason"),
    [
        (CONFIGS["qwen3"], "Abacus 9", torch.bfloat16, "the peak FLOP rate of Abacus 9 is unknown"),
        (CONFIGS["qwen3"], "NVIDIA H200", torch.float32, "the policy computes in torch.float32"),
        (GPT2Config(), "NVIDIA H200", torch.bfloat16, "the FLOPs of architecture gpt2"),
    ],
)
def test_unknown_mfu_is_logged_once_and_omitted(
    config: PretrainedConfig,
    device: str,
    dtype: torch.dtype,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        meter = ActorUtilization(config, device, dtype, num_devices=2)
        found = [meter.metrics(BATCH, 1.0) for _ in range(3)]
    assert found == [{}, {}, {}]
    [message] = caplog.messages
    assert reason in message


@pytest.mark.slow
def test_names_and_memory_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = device_for("cpu").take_memory()
    assert set(memory) == {"perf/cpu_memory_used_gb", "perf/max_rss_gb"}
    assert 0.05 < memory["perf/max_rss_gb"] < 64  # Python with torch, in GiB
    assert 0.05 < memory["perf/cpu_memory_used_gb"] < 65_536
    assert device_for("cpu").name() == "cpu"
    ballast = bytearray(200 * 1024**2)  # zeros that are written to take memory
    ballast[::4096] = b"1" * len(ballast[::4096])
    del ballast
    peaks = [device_for("cpu").take_memory()["perf/max_rss_gb"] for _ in range(2)]
    assert peaks[0] - peaks[1] > 0.15  # the first had the ballast, the second begins after it
    resets: list[int] = []
    vendor = SimpleNamespace(
        get_device_name=lambda index: f"Ascend910B{3 + index}",
        max_memory_allocated=lambda: 3 * 1024**3,
        max_memory_reserved=lambda: 4 * 1024**3,
        mem_get_info=lambda: (59 * 1024**3, 64 * 1024**3),
        reset_peak_memory_stats=lambda: resets.append(1),
    )
    # no such device is here; its API is what is asked
    monkeypatch.setattr(torch, "npu", vendor, raising=False)
    npu: Device = device_for("npu")
    assert npu.name() == "Ascend910B3"
    memory = npu.take_memory()
    assert memory["perf/max_memory_allocated_gb"] == 3.0
    assert memory["perf/max_memory_reserved_gb"] == 4.0
    assert (memory["perf/device_memory_used_gb"], resets) == (5.0, [1])


def test_frozen_weights_save_their_gradients_products() -> None:
    """Of 3 products per weight, the weight's own gradient is left out; adapters have all three."""
    config, lengths = Qwen3Config(**SIZES, head_dim=8), np.array([7, 5])
    whole, adapted = (training_flops(config, lengths, 4, number) for number in (0, 10))
    weights = 3 * (24 * 8 * (2 * 4 + 2 * 2) + 3 * 24 * 40)  # projections and MLP of three layers
    assert whole is not None
    assert adapted == whole - 2 * (weights * 12 + 50 * 24 * 4) + 2 * 3 * 10 * 12
