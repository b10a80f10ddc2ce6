"""Lets an environment's CUDA build of torch load without CUDA, and the environment see another's
packages.

`python -m tests.torch_without_cuda FOLDER OTHER`. Registries have some versions of torch with CUDA
alone. Its CPU kernels are the same, but it is linked with 6 GB of CUDA's libraries. The
requirements name the small ones that torch calls on any machine, cudart and cupti; stand-ins for
the others, made with `cc`, have functions that fail.
"""

import argparse
import re
import subprocess
from pathlib import Path

LINKED = (
    "libtorch_cuda.so",
    "libtorch_cpu.so",
    "libtorch_python.so",
    "libc10_cuda.so",
    "libtorch_nvshmem.so",
)
INSTALLED = ("libcudart.so", "libcupti.so")
OF_CUDA = r"(?:cu|nccl|nvshmem)"


def main() -> None:
    """Write the libraries, and the .pth file by which the environment sees the other's packages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("other", type=Path)
    arguments = parser.parse_args()
    packages, others = (_site_packages(folder) for folder in (arguments.folder, arguments.other))
    make_stand_ins(packages / "torch" / "lib")
    (packages / "other.pth").write_text(
        f"import site; site.addsitedir({str(others.resolve())!r})\n"
    )


def make_stand_ins(folder: Path) -> None:
    """Write a library for each one of CUDA's that those of torch in the folder are linked with."""
    names: set[str] = set()
    libraries: set[str] = set()
    versions: dict[str, str] = {}
    for file in LINKED:
        symbols = _output("nm", "-D", "--undefined-only", str(folder / file))
        for name, version in re.findall(rf" [Uw] ({OF_CUDA}\w*)(?:@(\S+))?", symbols):
            names.add(name)
            if version:
                versions[name] = version
        dynamic = _output("readelf", "-d", str(folder / file))
        libraries |= set(re.findall(rf"NEEDED.*\[(lib{OF_CUDA}[^\]]*)\]", dynamic))
    for library in sorted(library for library in libraries if not library.startswith(INSTALLED)):
        of_library = {version for version in versions.values() if _is_of(version, library)}
        version = of_library.pop() if of_library else ""
        functions = {name for name in names if versions.get(name, "") == version}
        _compile(folder / library, sorted(functions), version)


def _is_of(version: str, library: str) -> bool:
    """Symbols have the library's name for a version; those of libnvshmem_host.so.3 have NVSHMEM."""
    return version == library or library.startswith(f"lib{version.lower()}_")


def _compile(path: Path, functions: list[str], version: str) -> None:
    """A shared library of functions that return 1; unversioned ones are in each library that has no
    versions.
    """
    script = path.with_suffix(".map")
    script.write_text(f"{version} {{ global: *; }};\n")
    code = "".join(f"int {name}(void) {{ return 1; }}\n" for name in functions)
    command = [
        "cc",
        "-shared",
        "-nostdlib",
        "-fPIC",
        "-x",
        "c",
        "-",
        "-o",
        str(path),
        f"-Wl,-soname,{path.name}",
    ]
    subprocess.run([*command, f"-Wl,--version-script,{script}"], input=code, text=True, check=True)
    script.unlink()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _site_packages(environment: Path) -> Path:
    [folder] = environment.glob("lib/python3*/site-packages")
    return folder


if __name__ == "__main__":
    main()
