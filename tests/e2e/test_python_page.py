"""The code of docs/python.md, with a tiny model and a server that adds numbers."""

import logging
import re
from pathlib import Path

import pytest
import yaml

from tests.integration.arithmetic_server import running
from tests.trainings import build_world, settings

PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"


def test_the_page_trains_evaluates_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    build_world(tmp_path)  # writes model
    few = {"num_train": 60, "num_eval": 12, "max_level": 1}
    data = {"train": "arithmetic", "eval": "arithmetic", "arithmetic": few}
    recipe = settings(data={**data, "max_prompt_tokens": 96}, train={"num_ranks": 1})
    Path("my.yaml").write_text(yaml.safe_dump(recipe))
    names: dict[str, object] = {}
    with running() as server:
        server.behave = lambda handler, prompt, attempt: handler.say("\\boxed{7}")
        for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", PAGE.read_text(), re.MULTILINE):
            code = "\n".join(line[4:] for line in block.splitlines())
            exec(re.sub(r"http://127\.0\.0\.1:800\d", server.url, code), names)
    steps = [line for line in caplog.messages if re.match(r"step:\d - .*critic/score/mean:", line)]
    assert len(steps) == names["training"].steps == 2  # type: ignore[attr-defined]
    assert names["summary"].n == names["change"].n == 12  # type: ignore[attr-defined]
    assert {"report.html", "report.md", "report.json"} <= {
        path.name for path in Path("report").iterdir()
    }
