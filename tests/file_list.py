"""Prints docs/files.md (`make files`): every source file with the start of its docstring."""

import ast
import sys

from tasks.artifacts.stage_key import PROJECT_ROOT

PACKAGES = ("flows", "tasks", "dapo_core", "eval", "downloads", "interop", "bench")


def file_list() -> str:
    """The page as Markdown: a table for each package."""
    lines = [
        "# Every file",
        "",
        "Written by `make files` from the first sentence of each file's docstring.",
    ]
    for package in PACKAGES:
        lines += ["", f"## {package}", "", "| file | what it holds |", "|---|---|"]
        for path in sorted((PROJECT_ROOT / package).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            if path.name != "__init__.py":
                phrase = " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")
                lines.append(
                    f"| `{path.relative_to(PROJECT_ROOT / package).as_posix()}` | {phrase} |"
                )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(file_list())
