"""The digest of the code a stage runs, found by reading source files: nothing is imported."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dapo_core.errors import StoreError

PROJECT_ROOT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = ("flows", "tasks", "dapo_core", "eval", "durable")
COMPILED_SUFFIXES = (".pyc", ".pyo", ".so")


@dataclass(frozen=True)
class ParsedSource:
    """What one source file contributes: the digest of its syntax tree, and the names it may import."""

    digest: str
    references: frozenset[str]


def code_digest(modules: Sequence[str], *, exclude: Collection[str] = (), root: Path = PROJECT_ROOT) -> str:
    """Returns sha256 over the code of `modules` and of all project modules they import, directly or not.

    Comments, docstrings and formatting do not count. An import inside a function counts, and so does a
    string that names a project module (plug-ins, `python -m`). A package among `modules` also brings the
    other files in its folder, such as templates. `exclude` cuts modules (of a package: all in it),
    and what only they import, out: those whose effect is in the key already.
    Raises StoreError for a module that does not exist.
    """
    digest = hashlib.sha256()
    for name in sorted(set(modules)):
        path = _find_module(root, name)
        if path is None:
            raise StoreError(f"the module {name!r}, which a stage declares as its code, does not exist in {root}")
        if path.name == "__init__.py":
            for data_file in _data_files(path.parent):
                content = hashlib.sha256(data_file.read_bytes()).hexdigest()
                digest.update(f"{data_file.relative_to(root).as_posix()}\0{content}\n".encode())
    for name, parsed in sorted(_closure(root, modules, exclude).items()):
        digest.update(f"{name}\0{parsed.digest}\n".encode())
    return digest.hexdigest()


def _closure(root: Path, modules: Sequence[str], exclude: Collection[str]) -> dict[str, ParsedSource]:
    """Returns every project module reachable from `modules`, excluded ones neither entered nor listed."""
    found: dict[str, ParsedSource] = {}
    waiting = list(modules)
    while waiting:
        lineage = _with_parents(waiting.pop())
        if not set(exclude).isdisjoint(lineage):
            continue
        for name in lineage:
            path = _find_module(root, name)
            if path is None or name in found:
                continue
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            found[name] = _parse(path.read_bytes(), package)
            waiting.extend(found[name].references)
    return found


def _with_parents(name: str) -> list[str]:
    """Returns a, a.b and a.b.c for a.b.c: importing a module runs its packages' __init__ first."""
    parts = name.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _find_module(root: Path, name: str) -> Path | None:
    if name.partition(".")[0] not in OWN_PACKAGES:
        return None
    base = root.joinpath(*name.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return path
    return None


def _data_files(package: Path) -> list[Path]:
    files = (
        path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", *COMPILED_SUFFIXES)
    )
    return sorted(files)


@functools.cache  # one process asks for many stages, which share most of their modules
def _parse(source: bytes, package: str) -> ParsedSource:
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    _strip_docstrings(nodes)
    pieces: list[str] = []
    _write_tree(tree, pieces)
    digest = hashlib.sha256("\0".join(pieces).encode("utf-8", "surrogatepass")).hexdigest()
    return ParsedSource(digest, frozenset(_references(nodes, package)))


def _strip_docstrings(nodes: Sequence[ast.AST]) -> None:
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            node.body = node.body[1:]


def _write_tree(node: ast.AST, pieces: list[str]) -> None:
    """Appends the tree without positions: what ast.dump tells, in a third of its time."""
    pieces.append(type(node).__name__)
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, ast.AST):
            _write_tree(value, pieces)
        elif isinstance(value, list):
            pieces.append("[")
            for item in value:
                if isinstance(item, ast.AST):
                    _write_tree(item, pieces)
                else:
                    pieces.append(repr(item))
            pieces.append("]")
        else:
            pieces.append(repr(value))


def _references(nodes: Sequence[ast.AST], package: str) -> Iterator[str]:
    """Yields every name in the file that can be a project module; names of functions are among them."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute_source(node, package)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(OWN_PACKAGES)
        ):
            yield node.value.partition(":")[0]


def _absolute_source(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    ancestors = parts[: len(parts) - node.level + 1]
    return ".".join([*ancestors, node.module] if node.module else ancestors)
