"""Python code from a model, in a process of its own with limits on time, memory, files and imports.

The process starts isolated (`python -I`), with an empty environment in an empty folder, loses the right to open
sockets and files beyond the modules it may import by an audit hook, and is killed with its children at the time limit.
This stops accidents and idle mischief of a model in training. It is no wall against an attacker: run foreign models in
a container.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

IMPORTS = ("math", "itertools", "functools", "collections", "string", "re", "fractions", "statistics")
LONGEST = 10_000  # characters of output that are kept

# Runs first in the child: import what is allowed, then forbid the rest; the program arrives on standard input.
_CHILD = """
import sys
source = sys.stdin.read()
allowed = set(sys.argv[1].split(","))
for name in sorted(allowed):
    __import__(name)
import builtins
real = builtins.__import__
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    if name.split(".")[0] not in allowed:
        raise ImportError(f"import of {name} is not allowed")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
code = compile(source, "<program>", "exec")
PREFIXES = ("open", "os.", "socket.", "subprocess.", "shutil.", "ctypes.", "pty.", "signal.", "mmap.", "fcntl.")
def watch(event, arguments):
    if event.startswith(PREFIXES) or event == "sys.addaudithook":
        raise PermissionError(f"{event} is not allowed")
sys.addaudithook(watch)
exec(code, {"__name__": "__main__"})
"""


@dataclass(frozen=True)
class Ran:
    """How a program ended."""

    ok: bool  # it ended by itself without an exception
    output: str  # what it printed
    error: str  # last line of its complaint, "timed out" included


def run_python(source: str, *, seconds: float = 2.0, memory_mib: int = 256, imports: Sequence[str] = IMPORTS) -> Ran:
    """Run a program.

    Args:
        source: Python text.
        seconds: Of wall time, and of processor time.
        memory_mib: Address space.
        imports: Modules it may import.
    """

    def limit() -> None:
        size = memory_mib << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))

    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, ",".join(imports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder,
            env={},
            preexec_fn=limit,
            start_new_session=True,
        )
        try:
            output, error = process.communicate(source, timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Ran(False, "", "timed out")
    lines = error.strip().splitlines()
    return Ran(process.returncode == 0, output[:LONGEST], lines[-1] if lines else "")
