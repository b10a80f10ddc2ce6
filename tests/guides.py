"""Accounts of the guides' scripts, as texts: `python -m tests.guides` writes those of
tests/data/guides again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interop.account import Account, account_of
from interop.foreign_config import nested
from interop.read import read_files

FOLDER = Path(__file__).parent / "data/guides"
ROWS = 17_917  # of DAPO-Math-17k without its repeats, by which epochs become steps
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.sh"))


def account_at(paths: Sequence[Path]) -> Account:
    """The account of files of another trainer's user."""
    reading = read_files(paths)
    return account_of(reading.settings, reading.trainer, facts={"num_train_rows": ROWS})


def tree_of(account: Account) -> dict[str, Any]:
    """Our keys as sections: the trainer's defaults, overridden by what is set."""
    entries = (*account.implied, *account.entries)
    return nested({name: value for each in entries for name, value in each.ours.items()})


def text_of(account: Account) -> str:
    """One line a setting, sorted: fate, their key and value, our keys and values, and the note."""
    lines = []
    for entry in account.entries:
        ours = ", ".join(f"{name}={value}" for name, value in entry.ours.items())
        said = f"{entry.setting.key}={entry.setting.value}{f' -> {ours}' if ours else ''}"
        lines.append(f"{entry.fate}: {said}{f' ({entry.note})' if entry.note else ''}")
    return (
        "\n".join(
            [f"{account.trainer} {account.version}, {len(account.entries)} keys", *sorted(lines)]
        )
        + "\n"
    )


def main() -> None:
    """Write the account of every script beside it."""
    for name in SCRIPTS:
        text = text_of(account_at([FOLDER / f"{name}.sh"]))
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
