"""What a source file imports, read from its syntax tree."""

import ast
from collections.abc import Iterator
from functools import cache

from tasks.artifacts.stage_key import PROJECT_ROOT

PACKAGES = ("flows", "tasks", "dapo_core", "eval", "downloads", "interop", "durable")


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((PROJECT_ROOT / name).read_text(encoding="utf-8"), filename=name)


@cache
def modules_of(name: str, with_types: bool = True, with_strings: bool = False) -> frozenset[str]:
    """Names of modules that the file imports anywhere; relative imports are made absolute.

    `with_types` adds imports under TYPE_CHECKING, `with_strings` modules that a string names, as in
    a table of plug-ins.
    """
    package = name.removesuffix(".py").split("/")[:-1]
    trees: list[ast.AST] = [tree_of(name)]
    found: set[str] = set()
    while trees:
        node = trees.pop()
        found.update(_named_by(node, package, with_strings))
        is_for_types = (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        )
        trees += node.orelse if is_for_types and not with_types else ast.iter_child_nodes(node)
    return frozenset(found)


def files_imported(
    name: str, with_types: bool = False, with_strings: bool = False
) -> frozenset[str]:
    """The project's files that a file imports when it runs, or also `with_types`."""
    modules = modules_of(name, with_types, with_strings)
    return frozenset(
        path for module in modules if (path := _file_of(module)) is not None and path != name
    )


def _named_by(node: ast.AST, package: list[str], with_strings: bool) -> Iterator[str]:
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
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        yield from (
            str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)
        )
    elif with_strings and isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value.partition(":")[0]


@cache
def _file_of(module: str) -> str | None:
    if module.partition(".")[0] not in PACKAGES or not module.replace(".", "").isidentifier():
        return None
    base = PROJECT_ROOT.joinpath(*module.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path.relative_to(PROJECT_ROOT).as_posix()
    return None
