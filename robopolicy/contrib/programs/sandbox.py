"""Sandbox for Python code of a model: a separate process with limits on time, memory, files and imports.

The process starts isolated (`python -I`), with an empty environment in an empty folder. An audit hook forbids sockets
and all files except the modules that it may import. The process is killed with its children at the time limit. The
sandbox stops accidents and careless code of a model in training. It does not stop an attacker: run untrusted models in
a container.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

IMPORTS = ("math", "itertools", "functools", "collections", "string", "re", "fractions", "statistics")
LONGEST = 10_000  # characters of output that are kept

# Runs first in the child: import the allowed modules, then forbid the rest.
_GUARD = """
import sys
import json
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
PREFIXES = ("open", "os.", "socket.", "subprocess.", "shutil.", "ctypes.", "pty.", "signal.", "mmap.", "fcntl.")
def watch(event, arguments):
    if event.startswith(PREFIXES) or event == "sys.addaudithook":
        raise PermissionError(f"{event} is not allowed")
"""

# Then a single program, read from standard input.
_ONCE = """
code = compile(sys.stdin.read(), "<program>", "exec")
sys.addaudithook(watch)
exec(code, {"__name__": "__main__"})
"""

# Or a program whose function is called: one line of inputs in, one line of results out, without state in between.
_ANSWERS = """
source, function = json.loads(sys.stdin.readline())
code = compile(source, "<program>", "exec")
sys.addaudithook(watch)
read, write, run = sys.stdin.readline, print, exec
def answer(given):
    try:
        space = {"__name__": "program", "print": lambda *given, **named: None}
        run(code, space)
        return [json.loads(json.dumps(space[function](given))), ""]
    except Exception as error:
        return [None, f"{type(error).__name__}: {error}"[:200]]
while line := read():
    write(json.dumps([answer(given) for given in json.loads(line)]), flush=True)
"""


@dataclass(frozen=True)
class SandboxResult:
    """Result of a program."""

    ok: bool  # it ended without an exception
    output: str  # its standard output
    error: str  # last line of its standard error, or "timed out"


def run_python(
    source: str,
    *,
    seconds: float = 2.0,
    memory_mib: int = 256,
    imports: Sequence[str] = IMPORTS,
    longest: int = LONGEST,
) -> SandboxResult:
    """Run a program.

    Args:
        source: Python text.
        seconds: Of wall time, and of processor time.
        memory_mib: Address space.
        imports: Modules it may import.
        longest: Characters of output that are kept.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = _start(_ONCE, folder, imports, memory_mib, int(seconds) + 1)
        try:
            output, error = process.communicate(source.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill(process)
            return SandboxResult(False, "", "timed out")
    return SandboxResult(process.returncode == 0, output.decode(errors="replace")[:longest], _last_line(error))


class SandboxWorker:
    """A function of a program that is called repeatedly in one process with the same limits.

    The program runs from scratch for every input, so that no result depends on an earlier one. A process that hangs,
    exceeds its limits or ends is replaced for the next call.
    """

    def __init__(
        self,
        source: str,
        function: str,
        *,
        seconds: float = 2.0,
        memory_mib: int = 256,
        imports: Sequence[str] = IMPORTS,
        longest: int = 1 << 20,
    ) -> None:
        """Configure the worker, whose process starts at the first call; `seconds` is per call, see `run_python`."""
        self.source, self.function, self.seconds = source, function, seconds
        self.memory_mib, self.imports, self.longest = memory_mib, tuple(imports), longest
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SandboxWorker:
        limits = {"seconds": self.seconds, "memory_mib": self.memory_mib, "longest": self.longest}
        return SandboxWorker(self.source, self.function, imports=self.imports, **limits)

    def call(self, inputs: Sequence[Any]) -> list[tuple[Any, str]]:
        """Results as plain values, each with an error message, empty if there is none.

        Raises:
            RuntimeError: The process ended; the last line of its standard error, or "timed out".
        """
        if self._process is None:
            self._folder = tempfile.TemporaryDirectory()
            self._process = _start(_ANSWERS, self._folder.name, self.imports, self.memory_mib, None)
            self._write([self.source, self.function])
        self._write(list(inputs))
        try:
            results = json.loads(self._line())
            return [(result, str(error)) for result, error in results]
        except (ValueError, TypeError) as error:
            raise RuntimeError(self.close() or "it returned invalid output") from error

    def close(self) -> str:
        """End the process; return the last line of its standard error. Repeated calls have no effect."""
        error = b""
        if self._process is not None:
            error = _kill(self._process)
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None
        return _last_line(error)

    def __del__(self) -> None:
        with suppress(Exception):  # at exit, modules may already be gone
            self.close()

    def _write(self, content: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):  # the next read reports the reason
            self._process.stdin.write(json.dumps(content).encode() + b"\n")
            self._process.stdin.flush()

    def _line(self) -> bytes:
        """Read the output up to the end of a line, or to its end."""
        assert self._process is not None and self._process.stdout is not None
        handle, found, end = self._process.stdout.fileno(), b"", time.monotonic() + self.seconds
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([handle], [], [], max(0.0, end - time.monotonic()))
            if not ready or len(found) > self.longest:
                self.close()
                raise RuntimeError("returned too much output" if ready else "timed out")
            part = os.read(handle, 1 << 16)
            if not part:
                break
            found += part
        return found


def _start(
    then: str, folder: str, imports: Sequence[str], memory_mib: int, cpu_seconds: int | None
) -> subprocess.Popen[bytes]:
    """Start a child with limits, which runs the guard and then the code `then`."""

    def limit() -> None:
        size = memory_mib << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        if cpu_seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))

    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD + then, ",".join(imports)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={},
        preexec_fn=limit,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> bytes:
    """End a child with its children; return its standard error."""
    if process.poll() is None:
        with suppress(subprocess.TimeoutExpired):  # a failed process ends by itself with an error message
            return process.communicate(timeout=0.2)[1] or b""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[1] or b""


def _last_line(error: bytes) -> str:
    lines = error.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
