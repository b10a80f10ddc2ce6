"""A recipe of texts alone needs no torchvision: it trains where none can be found."""

import os
import subprocess
import sys
from pathlib import Path

from tests.trainings import World

ROOT = Path(__file__).resolve().parents[2]
# Python imports a module of this name at the start of every process, also of vLLM's.
HIDING = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *arguments):
        if name.partition(".")[0] == "torchvision":
            return None
        return self.finder.find_spec(name, *arguments)

sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
TRAINING = """
import importlib.util
import sys
from pathlib import Path

from dapo_core.training import train
from tests.in_process import without_ray
from tests.trainings import config_of

assert importlib.util.find_spec("torchvision") is None
rollout = {"engine": "vllm", "memory_gigabytes": 0.1, "max_num_seqs": 8}
steps = {"num_ranks": 1, "total_steps": 1}
config = config_of(rollout=config_of().rollout.model_dump() | rollout, train=steps)
with without_ray():
    done = train(config, *map(Path, sys.argv[1:]))
print(f"trained {done.steps} step without torchvision")
"""


def test_a_training_on_texts_needs_no_torchvision(world: World, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    paths = os.pathsep.join(map(str, [tmp_path, ROOT]))
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(world.data), str(world.model), str(tmp_path / "out")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("trained 1 step without torchvision\n"), done.stderr[-3000:]
