"""`dapo config explain` and docs/keys.md."""

import pytest

from dapo_core.config.fields import known_fields
from dapo_core.errors import ConfigError
from flows.config import Config
from flows.keys import all_keys, explain, keys_page
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.stages import STAGES


def test_docs_keys_is_current_and_complete() -> None:
    page = keys_page()
    assert (PROJECT_ROOT / "docs/keys.md").read_text(encoding="utf-8") == page, "type: make keys"
    assert [name for name in known_fields(Config) if f"| `{name}` |" not in page] == []


def test_explain_shows_default_bounds_meaning_and_affected_stages() -> None:
    (key,) = explain("sampler.max_staleness")
    assert (key.default, key.values, key.stages) == (
        "3",
        "a whole number, >= 0, <= 64",
        "train_policy",
    )
    assert key.meaning.startswith("Maximum training steps between sampling a group")
    assert explain("serve.port")[0].stages == "nothing"
    assert explain("run.seed")[0].stages == "prepare_data, fetch_model, train_policy"
    assert explain("model.path")[0].stages == "fetch_model"
    assert explain("rollout.dtype")[0].values == "auto, float32, bfloat16, float16"
    assert explain("evaluate.top_k")[0].values == "a whole number or null, >= 1"


def test_explain_takes_sections_and_short_names_and_suggests_corrections() -> None:
    assert [key.name for key in explain("reward.overlong")] == [
        "reward.overlong.enabled",
        "reward.overlong.buffer_tokens",
        "reward.overlong.penalty_factor",
    ]
    assert {key.name for key in explain("dtype")} >= {"train.dtype", "serve.dtype"}
    with pytest.raises(
        ConfigError, match=r"unknown key train\.lerning_rate \(did you mean train\.learning_rate\?"
    ):
        explain("train.lerning_rate")


def test_every_key_has_a_meaning_and_real_stages() -> None:
    stages = {stage.name for stage in STAGES}
    for key in all_keys().values():
        assert key.meaning
        assert key.stages == "nothing" or set(key.stages.split(", ")) <= stages
