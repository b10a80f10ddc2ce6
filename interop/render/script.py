"""A launch as a shell script that a person reads and runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence


def script_of(argv: Sequence[str], env: Mapping[str, str], comments: Iterable[str] = ()) -> str:
    """A bash script: comments, exported variables, and `python3` with the arguments, one override a line."""
    head = ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in comments), "set -euo pipefail"]
    exports = [f"export {name}={shell_value(value)}" for name, value in env.items()]
    first = next(
        (number for number, word in enumerate(argv) if "=" in word and not word.startswith("--")), len(argv)
    )
    command = [shlex.join(["python3", *argv[:first]]), *map(shlex.quote, argv[first:])]
    return "\n".join([*head, "", *exports, "", " \\\n  ".join([*command, '"$@"'])]) + "\n"


def shell_value(value: str) -> str:
    """A value of external.env as a shell assigns it: $NAME is the value of a variable."""
    return f'"{value}"' if re.fullmatch(r"\$[A-Za-z_]\w*", value, re.ASCII) else shlex.quote(value)
