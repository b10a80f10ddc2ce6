"""Rules of the layout, read from the source: who may import whom, how large things get, what must
not appear.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.file_list import file_list
from tests.imports import files_imported, modules_of, tree_of

pytestmark = pytest.mark.slow  # `make check` runs them

ROOT = Path(__file__).resolve().parents[2]
LEAVES = ("durable", "heartbeat", "redaction")
PACKAGES = ("flows", "tasks", "dapo_core", "eval", "downloads", "interop")
OWN = (*PACKAGES, *(f"{name}.py" for name in LEAVES))
OWN_MODULES = {*PACKAGES, *LEAVES}
MAY_IMPORT: dict[str, set[str]] = {
    "flows": {*OWN_MODULES},
    "tasks": OWN_MODULES - {"flows"},
    "dapo_core": {"dapo_core", "eval", *LEAVES},
    "eval": {"eval", "downloads", *LEAVES},
    "downloads": {"downloads", *LEAVES},
    "interop": {"interop"},
    **{f"{name}.py": set() for name in LEAVES},
}
ONLY_IN = {
    "prefect": re.compile(r"(flows|tasks)/"),
    "ray": re.compile(r"dapo_core/cluster/\w+\.py"),
    "vllm": re.compile(r"dapo_core/(engines/\w+|weights/vllm_transfer)\.py"),
    "torch_npu": re.compile(r"dapo_core/machine/device\.py"),
}
MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_NESTING = 60, 8, 4
NESTING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
HEAVY = ("torch", "ray", "vllm", "prefect", "transformers", "matplotlib")
PLACES = re.compile(r"(?<![\w.$~{}/-])/(?:work|root|home|Users|mnt|media|opt|srv)/[\w.]")
REGISTRY = re.compile(
    r"https?://[^\s/'\"]*(?:pypi|mirror|artifactory|nexus|registry|proxy|wheel|npmjs)[^\s'\"]*"
    r"|--?(?:extra-)?index-url[ "
    r"=]+(?!https://download\.pytorch\.org/)\S+|PIP_(?:INDEX_URL|FIND_LINKS)\s*=\s*\S+"
)


@cache
def tracked() -> tuple[str, ...]:
    """Every file in git's index that is there."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    names = listing.splitlines()
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


def sources(*folders: str) -> list[str]:
    return [
        name for name in tracked() if name.endswith(".py") and name.partition("/")[0] in folders
    ]


def roots(name: str) -> set[str]:
    return {module.partition(".")[0] for module in modules_of(name)}


def functions(name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def depth(node: ast.AST, is_elif: bool = False) -> int:
    """Levels of blocks below a node; an elif is on the level of its if, an inner function begins at
    0.
    """
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        follows_else = (
            isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        )
        deepest = max(deepest, depth(child, follows_else))
    return deepest + (isinstance(node, NESTING) and not is_elif)


def child_modules(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that ran `code`."""
    script = (
        f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_rules_see_the_code() -> None:
    assert {name.partition("/")[0] for name in sources(*OWN)} == set(OWN)
    assert "ray" in roots("dapo_core/cluster/start.py")
    assert "torch_npu" in roots("dapo_core/machine/device.py")
    assert "prefect" in roots("flows/recipe_flow.py")
    nested = ast.parse(
        "def f():\n if a:\n  for b in c:\n   pass\n elif d:\n  with e:\n   while g:\n    pass"
    )
    assert depth(nested.body[0]) == 3  # elif counts as its if; with, while below it


@pytest.mark.parametrize("package", OWN)
def test_import_direction(package: str) -> None:
    wrong = {
        name: found
        for name in sources(package)
        if (found := roots(name) & OWN_MODULES - MAY_IMPORT[package])
    }
    assert not wrong


def room(name: str) -> str:
    """The sub-package that a file belongs to, or the file itself in the top folder of a package."""
    return "/".join(name.split("/")[:2])


def reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting.extend(graph[name])
    return found


def circles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Groups of nodes each of which reaches all others."""
    reach = {name: reachable(graph, name) for name in graph}
    return {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}


def importing(nodes: Callable[[str], str]) -> dict[str, set[str]]:
    """What each node imports, for types too; `nodes` maps a file to its node."""
    graph: dict[str, set[str]] = {nodes(name): set() for name in sources(*OWN)}
    for name in sources(*OWN):
        imported = {nodes(other) for other in files_imported(name, with_types=True)}
        graph[nodes(name)] |= imported - {nodes(name)}
    return graph


def test_a_file_and_a_room_can_be_read_without_what_imports_them() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {("b", "c")}
    assert circles(importing(room)) == set()
    assert circles(importing(str)) == set()


def test_the_core_takes_nothing_of_eval_but_answers_and_problems() -> None:
    taken = {
        module
        for name in sources("dapo_core")
        for module in modules_of(name)
        if module.startswith("eval")
    }
    assert {
        module for module in taken if not module.startswith(("eval.answers.", "eval.problems."))
    } == set()


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_stays_in_its_place(library: str) -> None:
    users = [name for name in sources(*OWN, "bench") if library in roots(name)]
    assert [name for name in users if not ONLY_IN[library].match(name)] == []


def test_torch_npu_is_imported_by_name_only() -> None:
    for name in sources(*OWN):
        assert not re.search(
            r"^\s*(import|from) torch_npu", (ROOT / name).read_text(), re.MULTILINE
        ), name


@pytest.mark.parametrize("package", OWN)
def test_function_shapes(package: str) -> None:
    wrong = []
    for name in sources(package):
        for function in functions(name):
            assert function.end_lineno is not None
            lines = function.end_lineno - function.lineno + 1
            given = function.args
            count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
            parameters = count + (given.vararg is not None) + (given.kwarg is not None)
            nesting = max((depth(node) for node in function.body), default=0)
            if lines > MAX_FUNCTION_LINES or parameters > MAX_PARAMETERS or nesting > MAX_NESTING:
                wrong.append(
                    f"{name}:{function.lineno} {function.name}: {lines=} {parameters=} {nesting=}"
                )
    assert wrong == []


def test_no_module_for_odds_and_ends() -> None:
    vague = re.compile(r"(^|/)(utils?|common|helpers?|misc)(/|\.py$)")
    assert [name for name in tracked() if vague.search(name)] == []


def test_no_machine_path_or_registry_in_tracked_files() -> None:
    for line in (
        "path: /work/main",
        'open("/root/.cache")',
        "--index-url https://pypi.example.org/simple",
    ):
        assert PLACES.search(line) or REGISTRY.search(line)
    for line in (
        "--index-url https://download.pytorch.org/whl/cpu",
        "see docs/home/page, https://host.org/work/1",
    ):
        assert PLACES.search(line) is REGISTRY.search(line) is None
    found = []
    for name in tracked():
        text = (ROOT / name).read_bytes().decode("utf-8", errors="replace")
        if name == "tests/unit/test_architecture.py":
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if match := PLACES.search(line) or REGISTRY.search(line):
                found.append(f"{name}:{number}: {match.group()}")
    assert found == []


def test_every_package_is_installed() -> None:
    """setuptools finds packages by their __init__.py."""
    folders = {name.rpartition("/")[0] for name in sources(*OWN) if "/" in name}
    assert {f"{folder}/__init__.py" for folder in folders} <= set(tracked())


def test_light_modules_load_nothing_heavy() -> None:
    assert child_modules("import flows.config").isdisjoint({*HEAVY, "numpy"})
    modules = [name.removesuffix(".py").replace("/", ".") for name in sources("eval")]
    code = "\n".join(f"import {module.removesuffix('.__init__')}" for module in modules)
    loaded = child_modules(code)
    assert "eval" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_the_supervisor_starts_with_the_standard_library_alone() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tasks.processes.supervisor"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=300)


def test_the_process_of_a_run_loads_no_framework() -> None:
    """Its stages' commands do, each on its own."""
    loaded = child_modules(
        "import flows.dapo_full, flows.single_stages, flows.dapo_nightly, tasks.preflight.machine"
    )
    assert "prefect" in loaded
    assert loaded.isdisjoint({"torch", "ray", "vllm", "transformers", "matplotlib"})


def test_help_loads_nothing_heavy_and_is_quick() -> None:
    ask = "import sys\nfrom flows.cli import main\nsys.argv = ['dapo', '--help']\n"
    loaded = child_modules(
        f"{ask}try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert "flows" in loaded
    assert loaded.isdisjoint(HEAVY)
    seconds = []
    for _ in range(2):
        before = os.times()
        subprocess.run(
            [sys.executable, "-c", f"{ask}main()"], cwd=ROOT, check=True, capture_output=True
        )
        after = os.times()
        seconds.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    assert min(seconds) < 0.5


def test_the_list_of_files_is_true() -> None:
    assert (ROOT / "docs/files.md").read_text(encoding="utf-8") == file_list(), "type: make files"
