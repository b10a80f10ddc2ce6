"""sampling: model, for rollouts and validation: values from generation_config.json, and
contradictions.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dapo_core.errors import ConfigError, ModelError
from dapo_core.model.sampling import (
    GENERATION_CONFIG,
    GREEDY,
    Sampling,
    read_eos_ids,
    read_sampling,
    with_model_sampling,
)
from tests.configs import make_config

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]}


def model(folder: Path, **values: Any) -> Path:
    (folder / GENERATION_CONFIG).write_text(json.dumps(values))
    return folder


def test_missing_generation_config_values_are_neutral(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_sampling(model(tmp_path, **QWEN3)) == Sampling(0.6, 0.95, 20)
    assert read_sampling(model(tmp_path, top_p=0.8, top_k=0)) == Sampling(1.0, 0.8, -1)
    assert read_sampling(model(tmp_path, do_sample=False)) == GREEDY
    assert read_sampling(model(tmp_path, temperature=0.7, repetition_penalty=1.0)) == Sampling(0.7)
    assert caplog.text == ""
    read_sampling(model(tmp_path, temperature=0.7, repetition_penalty=1.05))
    assert "recommends {'repetition_penalty': 1.05}, which training does not apply" in caplog.text
    with pytest.raises(
        ModelError, match=r"has no temperature, top_p or top_k .*set rollout\.sampling"
    ):
        read_sampling(model(tmp_path, eos_token_id=1))
    (tmp_path / GENERATION_CONFIG).write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read_sampling(tmp_path)


def test_sampling_model_uses_the_models_values(tmp_path: Path) -> None:
    model(tmp_path, **QWEN3)
    plain, whole_steps = make_config(rollout={"temperature": 0.8}), {"max_staleness": 0}
    assert with_model_sampling(plain, tmp_path) is plain
    sampled = {"every": 1, "sampling": "model", "num_samples": 4}
    config = with_model_sampling(
        make_config(rollout={"sampling": "model"}, validation=sampled, sampler=whole_steps),
        tmp_path,
    )
    for section in (config.rollout, config.validation):
        assert (section.sampling, section.temperature, section.top_p, section.top_k) == (
            "settings",
            0.6,
            0.95,
            20,
        )
    assert config.validation.num_samples == 4
    with pytest.raises(
        ConfigError,
        match=r"rollout\.sampling=model uses Sampling\(temperature=0\.6, top_p=0\.95, top_k=20\) "
        r"of generation_config\.json, but sampler\.max_staleness=3 with rollout\.top_p=0\.95",
    ):
        with_model_sampling(make_config(rollout={"sampling": "model"}), tmp_path)
    corrected = {"rollout_correction": {"importance": "token"}}
    with pytest.raises(
        ConfigError, match=r"rollout\.top_p=0\.95, rollout\.top_k=20 would correct for the trunc"
    ):
        with_model_sampling(
            make_config(rollout={"sampling": "model"}, algorithm=corrected), tmp_path
        )
    model(tmp_path, do_sample=False)
    with pytest.raises(
        ConfigError, match="is greedy, which would repeat the same response 16 times"
    ):
        with_model_sampling(make_config(rollout={"sampling": "model"}), tmp_path)
    with pytest.raises(ConfigError, match=r"validation\.num_samples=4 at temperature 0"):
        with_model_sampling(make_config(validation=sampled), tmp_path)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"rollout": {"sampling": "model", "temperature": 0.5}},
            r"rollout\.temperature=0\.5 would be ignored by rollout\.sampling=model.*remove it",
        ),
        (
            {"validation": {"sampling": "model", "top_p": 0.5, "top_k": 3}},
            r"validation\.top_p=0\.5, validation\.top_k=3 would be ignored .*remove them",
        ),
        (
            {"validation": {"every": 1, "num_samples": 4}},
            r"num_samples=4 at temperature 0 would repeat the same response 4 times",
        ),
        (
            {"validation": {"every": 1, "top_k": 4}},
            r"validation\.top_k=4 would be ignored at temperature 0",
        ),
        (
            {"validation": {"before_training": True}},
            r"before_training=true needs validations.*validation\.every",
        ),
        (
            {"rollout": {"chat_template_kwargs": {"tokenize": True}}},
            r"rollout\.chat_template_kwargs\.tokenize is set by the project",
        ),
    ],
)
def test_keys_without_effect_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_config(**sections)


def test_a_model_folder_without_eos_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    with pytest.raises(ModelError, match="has eos_token_id"):
        read_eos_ids(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert read_eos_ids(tmp_path) == [5, 7]
