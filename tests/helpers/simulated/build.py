"""Compilation of the simulated accelerator: `python tests/helpers/simulated/build.py`, about half a minute.

The library lies in a folder named after the sources and the version of torch, so that it is compiled once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

EXTENSION = "simulated_device"
HERE = Path(__file__).resolve().parent
SOURCES = ("device.cpp", "kernels.cpp")
CACHE = Path(os.environ.get("SIMULATED_DEVICE_CACHE") or Path(sys.prefix) / "share" / EXTENSION)


def missing() -> str:
    """Why the device cannot be compiled here; empty if it can."""
    if _path().is_file():
        return ""
    if shutil.which(_compiler()) is None:
        return f"needs a C++ compiler ({_compiler()})"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else "needs the headers of Python"


def library() -> Path:
    """Path of the library, which is compiled at the first call."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one compiles
        if not path.is_file():
            _compile(path)
    return path


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _path() -> Path:
    content = b"".join((HERE / name).read_bytes() for name in (*SOURCES, "device.h"))
    key = hashlib.sha256(content + f"{torch.__version__} {sys.version}".encode()).hexdigest()[:16]
    return CACHE / key / f"{EXTENSION}.so"


def _compile(path: Path) -> None:
    include = [f"-I{folder}" for folder in [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]]
    abi = int(torch.compiled_with_cxx11_abi())
    macros = [f"-DTORCH_EXTENSION_NAME={EXTENSION}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    flags = ["-std=c++20", "-O1", "-g0", "-fPIC", "-w", *macros]

    def compiled(name: str) -> str:
        target = str(path.parent / f"{name}.{os.getpid()}.o")
        subprocess.run([_compiler(), *flags, *include, "-c", str(HERE / name), "-o", target], check=True)
        return target

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, SOURCES))
    folder = Path(torch.__file__).parent / "lib"
    temporary = path.with_suffix(f".{os.getpid()}.so")
    libraries = [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    subprocess.run([_compiler(), "-shared", *objects, *libraries, "-o", str(temporary)], check=True)
    temporary.replace(path)
    for name in objects:
        Path(name).unlink()


if __name__ == "__main__":
    reason = missing()
    print(f"simulated device: {reason or library()}")  # noqa: T201
