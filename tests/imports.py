"""Which of the project's files a source file imports, read from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from tasks.artifacts.stage_key import PROJECT_ROOT

PACKAGES = ("flows", "tasks", "dapo_core", "eval", "durable")


@cache
def imports_of(name: str, with_strings: bool = False) -> frozenset[str]:
    """Files that the file imports anywhere but under TYPE_CHECKING; paths relative to the project's root.

    `with_strings` adds modules that a string names, as in a table of plug-ins.
    """
    package = name.removesuffix(".py").split("/")[:-1]
    tree = ast.parse((PROJECT_ROOT / name).read_text(encoding="utf-8"))
    modules = list(_modules(tree, package, with_strings))
    return frozenset(path for module in modules if (path := _file_of(module)) is not None and path != name)


def _modules(node: ast.AST, package: list[str], with_strings: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        source = ".".join([*base, node.module] if node.module else base)
        submodules = [f"{source}.{alias.name}" for alias in node.names]
        found = [module for module in submodules if _file_of(module) is not None]
        yield from found
        if len(found) < len(submodules):
            yield source
    elif with_strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.partition(":")[0]
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in node.orelse if is_for_types else ast.iter_child_nodes(node):
        yield from _modules(child, package, with_strings)


@cache
def _file_of(module: str) -> str | None:
    if module.partition(".")[0] not in PACKAGES or not module.replace(".", "").isidentifier():
        return None
    base = PROJECT_ROOT.joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path.relative_to(PROJECT_ROOT).as_posix()
    return None
