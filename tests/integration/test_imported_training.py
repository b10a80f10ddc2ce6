"""The guides' scripts, imported with --tiny, train two steps."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapo_core.metrics.log import METRICS_FILE
from dapo_core.training import train
from durable import read_json_lines
from flows.cli import app
from flows.config import load_config
from tests.guides import FOLDER
from tests.in_process import without_ray
from tests.trainings import World

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)
"""


ROWS = ("--set-env", "num_train_rows=17398")
CASES = {  # files, and options beside --tiny
    "32B": (["qwen3_32b.sh"], ()),
    "8B": (["qwen3_8b.sh"], ()),
    "8B, GRPO": (["qwen3_8b_grpo.sh"], ()),
    "VL-30B": (["vl_30b.sh"], ROWS),
    "235B": (["qwen3_235b.sh"], ROWS),
    "MindSpeed-RL": (["mindspeed_rl_32b.yaml", "mindspeed_rl_math_17k.yaml"], ()),
}
CLIPS = {"8B, GRPO": 0.2}  # the upper one, where it is not 0.28
ALLOWED = {"235B": 2}  # keys that verl does not have


@pytest.mark.parametrize("name", CASES)
def test_an_imported_guide_script_trains(name: str, world: World, tmp_path: Path) -> None:
    """Their algorithm on our smallest model; the scorer is the script's REWARD_PATH."""
    scorer, recipe = tmp_path / "reward_score.py", tmp_path / "tiny.yaml"
    scorer.write_text(SCORER)
    files, options = CASES[name]
    is_scored = name.startswith("8B")
    own = ["--set-env", f"REWARD_PATH={scorer}"] if is_scored else []
    words = ["import-config", *(str(FOLDER / file) for file in files), "--tiny", *options, *own]
    blocking = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["blocking"]
    assert len(blocking) == ALLOWED.get(name, 0), blocking
    allowed = [word for key in blocking for word in ("--allow", key)]
    done = CliRunner().invoke(app, [*words, *allowed, "--output", str(recipe)])
    assert done.exit_code == 0, done.output
    config = load_config(recipe)
    assert config.algorithm.clip_ratio_high == CLIPS.get(name, 0.28)
    assert config.custom_reward.path == (str(scorer) if is_scored else None)
    assert config.algorithm.kl.place == ("loss" if is_scored else "off")
    with without_ray():
        train(config, world.data, world.model, tmp_path / "out")
    steps = read_json_lines(tmp_path / "out" / METRICS_FILE)
    assert len(steps) == 2
    if is_scored:
        assert all("actor/kl_loss" in step for step in steps)
        assert all(step["critic/score/max"] > 0 for step in steps)
