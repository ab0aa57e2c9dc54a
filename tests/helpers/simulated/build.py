"""Compilation of the simulated accelerator: `python tests/helpers/simulated/build.py`, about half a minute.

The library lies in a folder named after the sources and the version of torch, so that it is compiled once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torchgen
import yaml
from torch.utils import cpp_extension

EXTENSION = "simulated_device"
HERE = Path(__file__).resolve().parent
SINGLE_LAUNCH = (  # composites that are one kernel on CUDA, in addition to the structured ones
    *("native_group_norm", "native_layer_norm", "abs", "embedding", "mv", "addr", "all.dims_out", "any.dims_out"),
    *("nan_to_num", "isinf", "_safe_softmax"),
)
SOURCES = ("device.cpp", "kernels.cpp")
CACHE = Path(os.environ.get("SIMULATED_DEVICE_CACHE") or Path(sys.prefix) / "share" / EXTENSION)


def missing() -> str:
    """Why the device cannot be compiled here; empty if it can."""
    if library().is_file():
        return ""
    if shutil.which(_compiler()) is None:
        return f"needs a C++ compiler ({_compiler()})"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if headers.is_file() else "needs the headers of Python"


def operators() -> list[list[str]]:
    """Operators that accept CPU scalars among tensors of the device, and those that are one launch on CUDA."""
    return json.loads(library().with_name("operators.json").read_text())


def build() -> None:
    """Compile the library, unless it exists."""
    path = library()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("operators.json").write_text(json.dumps(_operators()))
    if not path.is_file():
        _compile(path)


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def library() -> Path:
    """Path of the library for these sources and this torch."""
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


def _operators() -> tuple[list[str], list[str]]:
    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = {entry["func"].split("(")[0]: entry for entry in yaml.load(file.read_text(), yaml.CSafeLoader)}
    scalars, single = [], list(SINGLE_LAUNCH)
    for name, entry in entries.items():
        delegate = entries.get(entry.get("structured_delegate", ""), {})
        if (entry.get("device_check") or delegate.get("device_check")) == "NoCheck":
            scalars.append(f"aten::{name}")
        fused = name.startswith("_foreach_") and any("CUDA" in key for key in entry.get("dispatch", {}))
        if fused or "structured_delegate" in entry:
            single.append(name)
    return scalars, single


if __name__ == "__main__":
    reason = missing()
    if not reason:
        build()
    print(f"simulated device: {reason or library()}")  # noqa: T201
