"""Identity of a training: what a checkpoint is bound to, and what may be changed midway."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dapo_core.checkpoint.identity import refuse_other_training, training_identity
from dapo_core.config.fields import is_volatile, known_fields
from dapo_core.config.train import TrainConfig
from dapo_core.draw.prompts import Prompt, PromptStream
from dapo_core.errors import CheckpointError, ConfigError
from dapo_core.model.inputs import ModelInput
from flows.config import Config
from tasks.stages import TRAIN_POLICY
from tests.configs import make_config

BEFORE = {"run.seed": 3, "train.learning_rate": 1e-6, "train.weight_decay": 0.1, "prompts": "ab"}
NOW = {**BEFORE, "run.seed": 4, "prompts": "cd"}


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path / "model"


def _identity(model_path: Path, answer: str = "1", **sections: dict) -> dict:
    stream = PromptStream(
        [Prompt(0, ModelInput((3, 4)), "arithmetic", answer)], seed=0, shuffle=True
    )
    return training_identity(make_config(model_path, **sections), stream.digest, model_path)


def _changed(before: dict, now: dict) -> set[str]:
    return {name for name in {*before, *now} if before.get(name) != now.get(name)}


@pytest.mark.parametrize(
    ("sections", "changed"),
    [
        ({"train": {"learning_rate": 1e-5}}, {"train.learning_rate"}),
        ({"train": {"train_prompts": 256}}, {"train.train_prompts"}),
        ({"algorithm": {"kl": {"place": "loss"}}}, {"algorithm.kl.place"}),
        ({"data": {"shuffle": False}}, {"data.shuffle"}),
        ({"run": {"deterministic": True}}, {"run.deterministic"}),
        (
            {"custom_reward": {"name": "grade", "path": "SCORER"}},
            {"custom_reward.name", "custom_reward.path"},
        ),
        # Where and how fast the work is done, how far, and what is looked at meanwhile.
        ({"train": {"num_ranks": 2, "sequence_parallel": 2, "max_restarts": 0}}, set()),
        ({"train": {"micro_batch_tokens": 65536, "total_steps": 7}}, set()),
        ({"train": {"passes": 2, "adam_beta2": 0.95}}, {"train.passes", "train.adam_beta2"}),
        ({"rollout": {"num_workers": 3}, "run": {"name": "other"}}, set()),
        ({"checkpoint": {"keep_best": 1, "save_every": 3}, "validation": {"every": 2}}, set()),
        ({"store": {"path": "elsewhere"}, "serve": {"port": 8000}, "evaluate": {"seed": 5}}, set()),
    ],
)
def test_settings_that_change_the_training_are_in_its_identity(
    model_path: Path, tmp_path: Path, sections: dict[str, dict], changed: set[str]
) -> None:
    if "custom_reward" in sections:
        scorer = tmp_path / "scorer.py"
        scorer.write_text("def grade(): ...", encoding="utf-8")
        sections = {"custom_reward": {**sections["custom_reward"], "path": str(scorer)}}
    assert _changed(_identity(model_path), _identity(model_path, **sections)) == changed


def test_the_reference_model_is_identified_by_content(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "config.json").write_text("{}", encoding="utf-8")
    kl = {"place": "loss", "reference_path": str(model_path)}
    first = _identity(model_path, algorithm={"kl": kl})
    assert (
        _identity(model_path, algorithm={"kl": {**kl, "reference_path": str(tmp_path / "moved")}})
        == first
    )
    (tmp_path / "moved" / "config.json").write_text("[]", encoding="utf-8")
    other = _identity(
        model_path, algorithm={"kl": {**kl, "reference_path": str(tmp_path / "moved")}}
    )
    assert _changed(first, other) == {"algorithm.kl.reference_path"}


def test_a_schedule_that_decays_to_the_end_forbids_more_steps(model_path: Path) -> None:
    def identities(**schedule: object) -> list[dict]:
        return [
            _identity(model_path, train={"total_steps": steps, **schedule}) for steps in (100, 200)
        ]

    assert _changed(*identities(schedule="cosine")) == {"train.total_steps"}
    assert _changed(*identities(schedule="cosine", schedule_steps=3200)) == set()


def test_the_identity_contains_known_non_volatile_keys(model_path: Path) -> None:
    identity = _identity(model_path)
    assert set(identity) - {"prompts", "model"} <= set(known_fields(Config))
    trained = {name.split(".")[1] for name in identity if name.startswith("train.")}
    lasting = {name for name in TrainConfig.model_fields if not is_volatile(TrainConfig, name)}
    assert trained == lasting - {"total_steps", "profile"}
    assert json.loads(json.dumps(identity)) == identity  # as a checkpoint gives it back


def test_files_are_identified_by_content_not_path(model_path: Path, tmp_path: Path) -> None:
    before = _identity(model_path)
    assert _changed(before, _identity(model_path.rename(tmp_path / "moved"))) == set()
    assert _changed(before, _identity(tmp_path / "moved", answer="2")) == {"prompts"}
    (tmp_path / "moved" / "config.json").write_text('{"a": 1}', encoding="utf-8")
    assert _changed(before, _identity(tmp_path / "moved")) == {"model"}
    digests = []
    for place, text in (("a.py", "x"), ("b.py", "x"), ("b.py", "y")):
        (tmp_path / place).write_text(text, encoding="utf-8")
        identity = _identity(tmp_path / "moved", custom_reward={"path": str(tmp_path / place)})
        digests.append(identity["custom_reward.path"])
    assert digests == [hashlib.sha256(text).hexdigest() for text in (b"x", b"x", b"y")]


def test_resuming_another_training_is_refused_with_the_differences(tmp_path: Path) -> None:
    assert refuse_other_training(tmp_path, BEFORE, dict(BEFORE)) == []
    assert refuse_other_training(tmp_path, BEFORE, dict(BEFORE), allowed=["run.seed"]) == []
    with pytest.raises(
        CheckpointError,
        match=r"belongs to another training \(prompts 'ab' -> 'cd', run\.seed 3 -> 4\), .*"
        r"a new --output, .*--set 'checkpoint\.allow_changed=\[prompts, run\.seed\]'",
    ):
        refuse_other_training(tmp_path, BEFORE, NOW)
    now = {
        "rollout.top_p": 0.5,
        **{name: value for name, value in BEFORE.items() if name != "run.seed"},
    }
    with pytest.raises(
        CheckpointError, match=r"\(rollout\.top_p None -> 0\.5, run\.seed 3 -> None\)"
    ):
        refuse_other_training(tmp_path, BEFORE, now)


def test_allowed_changes_are_reported_and_others_refused(tmp_path: Path) -> None:
    assert refuse_other_training(tmp_path, BEFORE, NOW, allowed=("run.seed", "prompts")) == [
        "prompts 'ab' -> 'cd'",
        "run.seed 3 -> 4",
    ]
    with pytest.raises(
        CheckpointError,
        match=r"training \(run\.seed 3 -> 4\), .*"
        r"allow_changed=\[prompts, train\.weight_decay, run\.seed\]",
    ):
        refuse_other_training(tmp_path, BEFORE, NOW, allowed=("train.weight_decay", "prompts"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "train.learnig_rate",
            r"names train\.learnig_rate, .* \(did you mean train\.learning_rate\?\)",
        ),
        (
            "train.num_ranks",
            r"names train\.num_ranks, which is not part of a checkpoint's identity; remove it",
        ),
    ],
)
def test_an_unknown_key_in_allow_changed_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_other_training(tmp_path, BEFORE, NOW, allowed=(name, "prompts"))


def test_the_identity_covers_the_stages_cache_key(model_path: Path) -> None:
    def names(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from names(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    # A training may become longer; what is measured and kept on the way does not change it.
    keys = set(names(TRAIN_POLICY.key(make_config(model_path), {}).config))
    free = {
        "train.total_steps",
        "checkpoint.keep_best",
        *(key for key in keys if key.startswith("validation.")),
    }
    assert keys - _identity(model_path).keys() == free
