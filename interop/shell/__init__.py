"""Read bash scripts that start a training, without executing anything."""

from interop.shell.scope import MARK, ShellError, Unknown, Word, marks_of, numbers_of, shown
from interop.shell.walk import Command, Script, read_script, shell_in, starts_nothing

__all__ = [
    "MARK",
    "Command",
    "Script",
    "ShellError",
    "Unknown",
    "Word",
    "marks_of",
    "numbers_of",
    "read_script",
    "shell_in",
    "shown",
    "starts_nothing",
]
