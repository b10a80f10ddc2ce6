"""`dapo compare` for trainings: logs of other trainers and dapo runs side by side."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapo_core.metrics.log import MetricsLog, format_step
from eval.results.rows import ResultsError
from flows.cli import app
from tasks.runs.compare_trainings import Ends, compare_trainings, render_markdown, write_page


@pytest.fixture
def logs(tmp_path: Path) -> dict[str, Path]:
    """A verl console log, a MindSpeed console log and a metrics.jsonl, of 20 steps each."""
    verl, mindspeed = tmp_path / "verl.log", tmp_path / "mindspeed.log"
    (tmp_path / "own").mkdir()
    ours = MetricsLog(tmp_path / "own", None)
    verl_lines, mindspeed_lines = [], []
    for step in range(1, 21):
        values = {
            "critic/rewards/mean": step / 20,
            "actor/entropy": 1 / step,
            "response_length/mean": 1000 + step,
        }
        verl_lines.append(
            f"(TaskRunner pid=1) {format_step(step, {**values, 'perf/throughput': 70.0})}\n"
        )
        mindspeed_lines.append(
            f"[2025-09-04 01:02:03] iteration: {step} / 20 | dapo/rewards/mean : {step / 40:.4f} | "
            f"e2e_tps : 50.0000 | response_length/mean : 900.0000\n"
        )
        ours.append(step, step, {**values, "perf/throughput": 90.0})
    verl.write_text("".join(verl_lines))
    mindspeed.write_text("".join(mindspeed_lines))
    return {"verl": verl, "mindspeed": mindspeed, "ours": ours.path}


def test_metrics_of_all_trainers_share_names(logs: dict[str, Path]) -> None:
    sides = compare_trainings(logs)
    assert [side.trainer for side in sides] == ["verl", "MindSpeed", "own"]
    # The first tenth of 20 steps is 1 and 2: (1/20 + 2/20) / 2. The last is 19 and 20.
    assert sides[0].metrics["critic/rewards/mean"] == Ends(
        pytest.approx(0.075), pytest.approx(0.975), 20
    )
    assert sides[1].metrics["critic/rewards/mean"].last == pytest.approx(0.48755, abs=1e-4)
    assert [side.metrics["perf/throughput"].last for side in sides] == [70, 50, 90]
    table = render_markdown(sides)
    assert "| tokens/s per device " in table
    assert "1,002 → 1,020" in table
    assert "counts all drawn prompts" in table  # of MindSpeed's throughput
    assert [row.split("|")[3].strip() for row in table.splitlines() if "entropy" in row] == ["-"]


@pytest.mark.slow
def test_the_page_plots_every_training(logs: dict[str, Path], tmp_path: Path) -> None:
    page = write_page(compare_trainings(logs), tmp_path / "out").read_text()
    assert page.count("<svg") == 4  # reward, length, entropy, throughput
    for text in ("Reward per response", "Response length", "Policy entropy", "Throughput", *logs):
        assert text in page
    content = json.loads((tmp_path / "out" / "trainings.json").read_text())
    throughput = {"first": 70.0, "last": 70.0, "num_steps": 20}
    assert content["verl"]["metrics"]["perf/throughput"] == throughput


@pytest.mark.slow
def test_the_command_takes_logs_and_folders(logs: dict[str, Path], tmp_path: Path) -> None:
    sides = [str(logs["verl"]), str(logs["ours"].parent), "--store", str(tmp_path / "none")]
    done = CliRunner().invoke(app, ["compare", *sides, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert re.search(r"`verl.log` \(verl\) \| +`own` \(own\) \|", done.output)
    assert (tmp_path / "out" / "trainings.html").is_file()
    refused = CliRunner().invoke(app, ["compare", sides[0], "--gate", "pooled >= before"])
    assert (refused.exit_code, "do not apply to training logs" in refused.output) == (2, True)


def test_a_file_without_steps_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("Traceback (most recent call last):\n")
    with pytest.raises(ResultsError, match="contains no training step"):
        compare_trainings({"train.log": log})
    with pytest.raises(ResultsError, match="7 trainings do not fit"):
        compare_trainings({str(number): log for number in range(7)})
