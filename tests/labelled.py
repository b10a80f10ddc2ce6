"""Labelled answers and responses: the tables of tests/answers."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "answers"


def rows(name: str) -> list[dict[str, str]]:
    """Read a table; in its cells, ⏎ stands for a line break."""
    lines = (FOLDER / f"{name}.tsv").read_text(encoding="utf-8").rstrip("\n").split("\n")
    fields, *cells = (line.replace("⏎", "\n").split("\t") for line in lines)
    return [dict(zip(fields, row, strict=True)) for row in cells]
