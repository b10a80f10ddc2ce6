"""The names in the Makefile's selections of tests exist: pytest silently ignores others."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text().replace("\\\n", " ")


def test_every_selected_file_and_name_exists() -> None:
    tests = ""
    for name in ("CORE_TESTS", "ENGINE_TESTS"):
        value = re.search(rf"^{name} := (.*)$", TEXT, re.MULTILINE)
        assert value
        for pattern, words in re.findall(r"\$\(patsubst %,(\S+),([^)]*)\)", value[1]):
            tests += "".join(
                (ROOT / pattern.replace("%", word)).read_text() for word in words.split()
            )
    for name in ("CORE_EXCLUDED", "ENGINE_SELECTION"):
        value = re.search(rf"^{name} := (.*)$", TEXT, re.MULTILINE)
        assert value
        names = re.findall(r"test_\w+", value[1])
        assert names
        assert [each for each in names if f"def {each}" not in tests] == []
