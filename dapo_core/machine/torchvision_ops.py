"""Lets a CUDA build of torchvision load beside a CPU build of torch.

Registries have torchvision for Linux with CUDA alone. Its compiled operators cannot be loaded
without it, and its Python code, such as the image processors of transformers and vLLM, fails unless
they are declared. `python -m dapo_core.machine.torchvision_ops` has every interpreter of the
environment, also of child processes, declare them when it imports torchvision.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PTH_FILE = "torchvision_ops.pth"
_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[Any] = []  # a declaration ends with its library


class _Finder:
    """Finds torchvision; nothing is imported until torchvision itself is."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "torchvision" else None
        if spec is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def declare_first(module: ModuleType) -> None:
                _declare(Path(str(module.__file__)).with_name("_C.so"))
                execute(module)

            loader.exec_module = declare_first
        return spec


def install() -> None:
    """Declare the operators in this process when torchvision is imported."""
    if not is_installed():
        sys.meta_path.insert(0, _Finder)


def is_installed() -> bool:
    """Return whether this process declares the operators."""
    return _Finder in sys.meta_path


def _declare(library: Path) -> None:
    """Declare the operators that torchvision needs while it is imported, unless they load."""
    import torch

    try:
        torch.ops.load_library(library)
    except OSError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(name + _BOXES)
        _kept.append(declared)


def main() -> None:
    """Write the file by which each interpreter of this environment installs the finder."""
    path = Path(sysconfig.get_path("purelib"), PTH_FILE)
    path.write_text(f"import {__spec__.name} as ops; ops.install()\n", encoding="utf-8")


if __name__ == "__main__":
    main()
