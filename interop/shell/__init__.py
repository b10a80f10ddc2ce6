"""Read bash scripts that start a training, without executing anything."""

from interop.shell.commands import Command, Script
from interop.shell.scope import ShellError, Unknown, Word, marks_of, numbers_of, shown
from interop.shell.script import read_script

__all__ = [
    "Command",
    "Script",
    "ShellError",
    "Unknown",
    "Word",
    "marks_of",
    "numbers_of",
    "read_script",
    "shown",
]
