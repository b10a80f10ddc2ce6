"""A killed `dapo train` ends with the same bits as an undisturbed one."""

import importlib
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dapo_core.checkpoint.folder import latest_checkpoint
from tests.trainings import World, settings

BENCH = Path(__file__).resolve().parents[2] / "bench"
NUM_STEPS = 6
WHOLE = {"rollout": {"temperature": 0.9}}  # the probe after each sync compares at 1
# from adapters alone, their moments and the dropout
ADAPTERS = {
    **WHOLE,
    "algorithm": {"kl": {"place": "loss", "coefficient": 0.5}},
    "train": {"num_ranks": 1, "lora": {"rank": 4, "alpha": 12, "dropout": 0.1}},
}


@pytest.mark.parametrize(
    ("sections", "roles"),
    [(WHOLE, ["rank", "worker", "raylet", "group"]), (ADAPTERS, ["driver"])],
    ids=["weights", "adapters"],
)
def test_a_killed_training_ends_with_the_same_bits(
    sections: dict[str, Any],
    roles: list[str],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`dapo train` restarts a dead rank or worker; its stage runs a dead command again.

    One kill a run of this test, of a random role, because each start of Ray takes a while.
    """
    monkeypatch.syspath_prepend(str(BENCH))
    crash = importlib.import_module("crash")
    recipe, chance = tmp_path / "recipe.yaml", random.Random(os.getpid())
    train = {"total_steps": NUM_STEPS, "restart_delay_seconds": 0.0, **sections.get("train", {})}
    recipe.write_text(yaml.safe_dump(settings(**{**sections, "train": train})))
    whole, killed = (
        crash.Training(recipe, world.data, world.model, tmp_path / name)
        for name in ("whole", "killed")
    )
    role = chance.choice(roles)
    moment = crash.Moment(role, chance.randint(1, 4), chance.uniform(0, 0.2))
    assert crash.train_through_kills(whole, []) == 0
    assert crash.train_through_kills(killed, [moment]) == 1, role
    log = killed.log_path.read_text(errors="replace")
    named = {"rank": "policy rank [01] of 2 .*", "worker": "rollout worker 0 of 1 .*"}
    if role in named:
        assert re.search(rf"{named[role]}died: .*training restarts in 0 s from", log), log[-3000:]
    assert crash.differences(whole.output, killed.output) == []
    checkpoint = latest_checkpoint(killed.output / "checkpoints")
    assert checkpoint is not None
    tensors = crash.read_tensors(checkpoint)
    assert "rng.rank_0" in {".".join(name.split(".")[:2]) for name in tensors}
    saved = [name for name in tensors if name.startswith(("model.", "optimizer."))]
    assert len(saved) > 50  # the comparison had something to compare
    assert all((".lora_" in name) == (sections is ADAPTERS) for name in saved)
