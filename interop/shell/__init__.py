"""Read bash scripts that start a training, without executing anything."""

from interop.shell.scope import ShellError, Unknown, Word, marks_of, numbers_of, shown
from interop.shell.walk import Command, Script, read_script

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
