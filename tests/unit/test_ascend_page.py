"""docs/ascend.md: the command line accepts its commands, and its recipes exist."""

import re
from pathlib import Path

import pytest

from tests.unit.test_deploy_files import parsed

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/ascend.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (dapo .*?)(?: +#.*)?$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line_accepts_every_command(line: str) -> None:
    parsed(line)
    for word in line.split():
        assert not word.startswith("configs/") or (ROOT / word).is_file()
