"""Engine arguments and parallelism that cannot work are refused before anything starts."""

from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dapo_core.config.engine_args import require_known
from dapo_core.engines.base import GenerationRequest, Row
from dapo_core.engines.factory import engine_settings
from dapo_core.engines.vllm_engine import (
    LOG_PROBS,
    VllmEngine,
    device_arguments,
    set_logprobs_mode,
)
from dapo_core.errors import ConfigError
from dapo_core.machine.device import device_for
from dapo_core.model.inputs import ModelInput
from flows.config import resolve_config
from tasks.preflight.finding import Findings
from tasks.preflight.machine import CPU_HEAD_WIDTHS, check_machine
from tasks.preflight.model import check_model
from tests.tiny_models import build_tiny, tiny_engine_settings
from tests.trainings import settings


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"engine_args": {"seed": 3}},
            r"rollout\.engine_args\.seed is set by the project: use run\.seed",
        ),
        ({"engine_args": {"tensor-parallel-size": 2}}, r"use rollout\.tensor_parallel"),
        ({"engine_args": {"max_num_batched_tokens": "8k"}}, r"=8k is not a number of tokens"),
        ({"engine_args": {"limit_mm_per_prompt": 3}}, r"=3 is not a mapping such as \{image: 2\}"),
        (
            {"engine": "hf", "tensor_parallel": 2},
            r"rollout\.tensor_parallel=2, .* need rollout\.engine=vllm",
        ),
        (
            {"engine": "hf", "speculation": "ngram"},
            r"speculation=ngram needs rollout\.engine=vllm in one pipeline stage, not .*=hf",
        ),
        ({"speculation": "ngram", "pipeline_parallel": 2}, r"with rollout\.pipeline_parallel=2"),
        ({"engine_args": {"speculative_config": {}}}, r"use rollout\.speculation"),
        ({"engine_args": {"pipeline_parallel_size": 2}}, r"use rollout\.pipeline_parallel"),
        ({"engine_args": {"enable_expert_parallel": True}}, r"use rollout\.expert_parallel"),
        (
            {"engine": "hf", "pipeline_parallel": 2},
            r"rollout\.pipeline_parallel=2 .* need rollout\.engine=vllm",
        ),
        (
            {"batch_invariant": True},
            r"batch_invariant=true with train\.device=cpu: vLLM has batch-invariant kernels",
        ),
        (
            {"batch_invariant": True, "engine": "hf"},
            r"vLLM, which rollout\.engine=hf does not have",
        ),
        (
            {"expert_parallel": True},
            r"expert_parallel=true has no effect with rollout\.tensor_parallel=1; set",
        ),
        (
            {"expert_parallel": True, "tensor_parallel": 2},
            r"expert_parallel=true with train\.device=cpu crashes: vLLM",
        ),
        (
            {"engine": "hf", "engine_args": {"enforce_eager": True}},
            r"\['enforce_eager'\] need rollout\.engine=",
        ),
    ],
)
def test_conflicting_or_unsupported_engine_keys_are_refused(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config(settings(rollout={"engine": "vllm", **keys}))


def test_parallelism_that_the_model_cannot_use_fails_preflight(tmp_path: Path) -> None:
    build_tiny(tmp_path / "model", "qwen3")  # two layers, no experts
    model = {"source": "path", "path": str(tmp_path / "model"), "recipe": {}}
    for keys, message in (
        (
            {"pipeline_parallel": 3},
            "rollout.pipeline_parallel=3 is more stages than the model's 2 layers",
        ),
        (
            {"tensor_parallel": 2, "expert_parallel": True},
            "rollout.expert_parallel=true, but qwen3 has no experts",
        ),
    ):
        config = resolve_config(
            settings(model=model, rollout={"engine": "vllm", **keys}, train={"device": "cuda"})
        )
        findings = Findings()
        check_model(tmp_path / "model", config, findings)
        [failed] = findings.failed
        assert message in f"{failed}"


def test_unknown_engine_arguments_are_refused() -> None:
    require_known(["enforce_eager", "kv_cache_dtype", "max_num_batched_tokens"])
    with pytest.raises(
        ConfigError,
        match=r"has no engine argument enforce_eagr \(rollout\.engine_args\); did you mean enf",
    ):
        require_known(["enforce_eagr"])


def test_engine_arguments_by_device() -> None:
    settings = tiny_engine_settings()  # 8 sequences of 96 tokens
    kinds = {device: device_arguments(device, settings) for device in ("cpu", "cuda", "npu")}
    for arguments in kinds.values():
        require_known(arguments)
    assert kinds["cpu"]["enable_chunked_prefill"] is False  # so a step must fit the longest prompt
    assert kinds["cpu"]["max_num_batched_tokens"] >= 96
    assert kinds["cuda"] == {
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 2048,
        "disable_custom_all_reduce": True,
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    }
    assert kinds["npu"] == {
        **kinds["cuda"],
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    invariant = device_arguments("npu", replace(settings, batch_invariant=True))
    assert invariant["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    many = device_arguments("npu", replace(settings, max_num_seqs=1500))
    assert many["max_num_batched_tokens"] == 3000
    assert many["cudagraph_capture_sizes"][-2:] == [1488, 1500]
    drafting = replace(settings, speculation="ngram")  # of up to 4 tokens per sequence
    assert device_arguments("cuda", drafting)["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 24, 32]
    # vLLM rejects both keys for the sizes
    own = {"cudagraph_capture_sizes": [1, 8], "max_num_batched_tokens": 64}
    assert device_arguments("npu", replace(settings, engine_args=own)) == {
        "gpu_memory_utilization": 0.5,
        "disable_custom_all_reduce": True,
        **own,
    }


def test_an_engine_wakes_without_features_of_pictures_that_its_sleep_lost() -> None:
    model: Any = torch.nn.Identity()
    model.deepstack_input_embeds = [torch.ones(2), torch.ones(2)]
    engine = VllmEngine.__new__(VllmEngine)
    engine.settings = replace(tiny_engine_settings(), sleep_level=2)
    engine._engine = SimpleNamespace(apply_model=lambda each: [each(model)], wake_up=lambda _: None)
    engine._wake(["weights"])
    assert not torch.cat(model.deepstack_input_embeds).any()


def test_only_deterministic_engines_on_npus_have_a_generator_per_response() -> None:
    request = GenerationRequest("0", ModelInput((1, 2)), seed=7)
    seeds = {}
    for device in ("cpu", "cuda", "npu"):
        for deterministic in (False, True):
            run, train = {"deterministic": deterministic}, {"device": device}
            engine = VllmEngine.__new__(VllmEngine)
            engine.settings = engine_settings(
                resolve_config(settings(run=run, train=train)), device_for(device)
            )
            engine._routing, engine._stop_ids = None, []
            with patch.object(engine, "_add") as add:
                engine._queue(Row(request, array("i"), array("f")))
            seeds[device, deterministic] = add.call_args.kwargs["seed"]

    assert seeds.pop(("npu", False)) is None
    assert set(seeds.values()) == {7}


@pytest.mark.parametrize("section", ["rollout", "serve"])
def test_devices_that_cannot_split_the_heads_fail_preflight(tmp_path: Path, section: str) -> None:
    build_tiny(tmp_path / "model", "qwen3")  # two heads
    model = {"source": "path", "path": str(tmp_path / "model"), "recipe": {}}
    changes: dict[str, dict[str, object]] = {"rollout": {"engine": "vllm"}, "serve": {}}
    changes[section]["tensor_parallel"] = 3
    config = resolve_config(settings(model=model, **changes))
    findings = Findings()
    check_model(tmp_path / "model", config, findings)
    [failed] = findings.failed
    assert (
        f"{section}.tensor_parallel=3 does not divide the model's 2 attention heads" in f"{failed}"
    )


@pytest.mark.slow
def test_head_sizes_without_a_cpu_kernel_fail_preflight(tmp_path: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert set(CPUAttentionBackend.get_supported_head_sizes()) <= set(CPU_HEAD_WIDTHS)
    build_tiny(tmp_path / "model", "llama", num_attention_heads=4)  # 64 / 4
    findings = Findings()
    config = resolve_config(settings())
    check_machine(config, check_model(tmp_path / "model", config, findings), None, False, findings)
    assert "head size is 16, but vLLM on a CPU supports 32, 64" in f"{findings.failed}"


@pytest.mark.slow
def test_a_sampler_built_without_the_mode_returns_log_probs_of_the_sampling_distribution() -> None:
    """vllm-ascend builds one like this: vLLM's sampler with other kernels."""
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler()
    assert sampler.logprobs_mode != LOG_PROBS
    set_logprobs_mode(SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)))
    set_logprobs_mode(SimpleNamespace(model_runner=SimpleNamespace(sampler=None)))

    expected = Sampler(LOG_PROBS)
    assert sampler.logprobs_mode == expected.logprobs_mode == LOG_PROBS
    assert (
        sampler.topk_topp_sampler.logprobs_mode
        == expected.topk_topp_sampler.logprobs_mode
        == LOG_PROBS
    )
