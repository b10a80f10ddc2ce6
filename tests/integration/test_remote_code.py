"""Python files in a model folder run only with model.trust_remote_code, even if someone answers
`y`.
"""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dapo_core.engines.factory import build_engine
from dapo_core.errors import CheckpointError, ModelError
from dapo_core.model.pretrained import (
    empty_causal_lm,
    load_causal_lm,
    load_model_config,
    load_tokenizer,
)
from dapo_core.policy.rank import Policy
from dapo_core.training import train
from flows.config import resolve_config
from tasks.serve_model.command import serve_command
from tests.configs import make_config
from tests.tiny_models import build_tiny_qwen3, tiny_engine_settings
from tests.trainings import settings

PAYLOAD = """
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerFast

Path({marker!r}).touch()


class Config(PretrainedConfig):
    model_type = "planted"


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that the payload creates."""
    return tmp_path / "ran"


@pytest.fixture
def planted(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose configuration and tokenizer reference classes in its own file."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    folder = build_tiny_qwen3(tmp_path / "model")
    (folder / "planted.py").write_text(PAYLOAD.format(marker=str(marker)))
    for name, changes in (
        ("config.json", {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Config"}}),
        (
            "tokenizer_config.json",
            {
                "tokenizer_class": "Tokenizer",
                "auto_map": {"AutoTokenizer": [None, "planted.Tokenizer"]},
            },
        ),
    ):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | changes))
    return folder


def _train(folder: Path) -> None:
    config = resolve_config(settings(train={"num_ranks": 1}))
    train(config, folder / "train.parquet", folder, folder / "output")


LOADERS: dict[str, Callable[[Path], Any]] = {
    "configuration": load_model_config,
    "tokenizer": load_tokenizer,
    "weights": lambda folder: load_causal_lm(folder, torch.float32),
    "architecture": lambda folder: empty_causal_lm(folder, torch.float32),
    "policy": lambda folder: Policy(folder, make_config(folder)),
    "training": _train,
    "hf engine": lambda folder: build_engine("hf", folder, tiny_engine_settings(), seed=0),
    "vllm engine": lambda folder: build_engine("vllm", folder, tiny_engine_settings(), seed=0),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_a_planted_file_does_not_run(planted: Path, marker: Path, loader: str) -> None:
    with pytest.raises((ModelError, CheckpointError, ValueError), match="trust_remote_code"):
        LOADERS[loader](planted)
    assert not marker.exists()


def test_a_planted_file_does_not_run_in_a_server(planted: Path, marker: Path) -> None:
    command = serve_command(planted, resolve_config(settings()).served, port=1)
    result = subprocess.run(
        command, input="y\n" * 100, capture_output=True, text=True, timeout=300, check=False
    )
    assert "trust_remote_code" in result.stdout + result.stderr
    assert result.returncode != 0
    assert not marker.exists()


def test_trust_remote_code_lets_it_run(planted: Path, marker: Path) -> None:
    assert load_model_config(planted, trust_remote_code=True).model_type == "planted"
    assert marker.exists()
    marker.unlink()
    assert load_tokenizer(planted, trust_remote_code=True).chat_template
    config = resolve_config(
        settings(model={"source": "path", "path": str(planted), "trust_remote_code": True})
    )
    assert serve_command(planted, config.served, port=1)[-1] == "--trust-remote-code"
