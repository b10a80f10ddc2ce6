"""Further arguments of vLLM's engine, and devices that share one: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo_core.config.engine_args import require_known
from dapo_core.errors import ConfigError
from flows.config import resolve_config
from tasks.preflight.finding import Findings
from tasks.preflight.model import check_model
from tests.tiny_models import build_tiny
from tests.trainings import settings


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"engine_args": {"seed": 3}}, r"rollout\.engine_args\.seed has a place of its own; use run\.seed"),
        ({"engine_args": {"tensor-parallel-size": 2}}, r"use rollout\.tensor_parallel"),
        ({"engine": "hf", "tensor_parallel": 2}, r"rollout\.tensor_parallel=2 .* are for rollout\.engine=vllm"),
        (
            {"engine": "hf", "engine_args": {"enforce_eager": True}},
            r"\['enforce_eager'\] are for rollout\.engine=",
        ),
    ],
)
def test_what_a_key_decides_or_an_engine_lacks_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_config(settings(rollout={"engine": "vllm", **keys}))


def test_arguments_are_those_of_the_installed_engine() -> None:
    require_known(["enforce_eager", "enable_expert_parallel", "max_num_batched_tokens"])
    with pytest.raises(
        ConfigError, match=r"engine_args\.enforce_eagr is no argument .* did you mean enforce_eager\?"
    ):
        require_known(["enforce_eagr"])


@pytest.mark.parametrize("section", ["rollout", "serve"])
def test_devices_that_cannot_share_the_heads_are_found_beforehand(tmp_path: Path, section: str) -> None:
    build_tiny(tmp_path / "model", "qwen3")  # two heads
    model = {"source": "path", "path": str(tmp_path / "model"), "recipe": {}}
    changes = {"rollout": {"engine": "vllm"}, section: {"engine": "vllm"} if section == "rollout" else {}}
    config = resolve_config(
        settings(model=model, **{**changes, section: {**changes[section], "tensor_parallel": 3}})
    )
    findings = Findings()
    check_model(tmp_path / "model", config, findings)
    [failed] = findings.failed
    assert f"{section}.tensor_parallel=3 devices cannot share 2 attention heads" in f"{failed}"
