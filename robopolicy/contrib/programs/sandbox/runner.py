r"""Execution of programs in the sandbox: once with their output, or as a function that is called repeatedly.

    with Sandbox() as sandbox:
        sandbox.run("print(6 * 7)").output                                        # "42\n"
        sandbox.call("def act(obs): return obs['x'] + 1", "act", [{"x": 1}])      # [(2, "")]

A sandbox is one process that runs every program, and every call of a function, in a fork of its own, so that no result
depends on an earlier one. Time, memory, output and input are bounded. Where the kernel does not offer the required
layers (`layers.py`), programs are refused unless `code_permissions(unsafe=True)` permits them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from robopolicy.contrib.programs.sandbox.layers import Layers
from robopolicy.contrib.programs.sandbox.seccomp import compute_only_filter
from robopolicy.errors import UserError
from robopolicy.permissions import may_run_unconfined

IMPORTS = ("math", "itertools", "functools", "collections", "string", "re", "fractions", "statistics")
MAX_OUTPUT = 10_000  # bytes of output of a program that are kept
MAX_ANSWERS = 1 << 20  # bytes of all results of a call
START_SECONDS, GRACE_SECONDS = 30.0, 2.0  # wall time to start, and to reply after the time of the programs
FRAME_BYTES = 64 << 20  # maximum size of a frame
_SERVER = Path(__file__).with_name("server.py")
_PR_SET_DUMPABLE = 4
_NAMESPACES = (  # options of bubblewrap; the server restricts the files further
    *("--unshare-all", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--clearenv"),
    *("--die-with-parent", "--new-session", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
)


@dataclass(frozen=True)
class SandboxResult:
    """Result of a program."""

    ok: bool  # it ended without an exception
    output: str  # start of its standard output
    error: str  # last line of its standard error, or "timed out"


class SandboxError(RuntimeError):
    """The programs of a call hung, crashed or returned too much; the next call starts again."""


class Sandbox:
    """Process that runs Python programs with limits; it starts at the first use and is replaced after a failure."""

    def __init__(
        self,
        *,
        seconds: float = 2.0,
        memory_mib: int = 256,
        imports: Sequence[str] = IMPORTS,
        bubblewrap: str | None = None,
    ) -> None:
        """Configure the sandbox.

        Args:
            seconds: Wall time of a program, or of all inputs of a call; also the CPU time of each.
            memory_mib: Address space of a program [MiB].
            imports: Modules that programs may import.
            bubblewrap: Path of bubblewrap; None searches it, "" does not use it.
        """
        self.seconds, self.memory_mib, self.imports = seconds, memory_mib, tuple(imports)
        self.bubblewrap = bubblewrap
        self._process: subprocess.Popen[bytes] | None = None
        self._layers = Layers()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        limits = {"seconds": self.seconds, "memory_mib": self.memory_mib, "imports": self.imports}
        return partial(Sandbox, **limits, bubblewrap=self.bubblewrap), ()  # a copy has a process of its own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # at exit, modules may already be gone
            self.close()

    @property
    def layers(self) -> Layers:
        """Layers that hold in this sandbox; starts it."""
        with self._lock:
            self._start()
            return self._layers

    def check(self) -> None:
        """Raise a UserError if this machine cannot confine programs and no permission was given; starts the sandbox."""
        layers = self.layers
        if not may_run_unconfined():
            layers.check()

    def run(self, source: str, *, max_output: int = MAX_OUTPUT) -> SandboxResult:
        """Run a program once.

        Args:
            source: Python text.
            max_output: Bytes of output that are kept.

        Raises:
            UserError: The machine cannot confine programs.
        """
        try:
            ((status, output, error),) = self._request(source, None, [None], max_output)
        except SandboxError as failure:
            return SandboxResult(False, "", str(failure))
        if status == "timed out":
            return SandboxResult(False, "", "timed out")
        return SandboxResult(status == 0, output, _reason(status, error) if status else "")

    def call(
        self, source: str, function: str, inputs: Sequence[Any], *, max_output: int = MAX_ANSWERS
    ) -> list[tuple[Any, str]]:
        """Call a function of a program with each of `inputs`, which are plain values.

        Returns:
            Results as plain values, each with an error message, empty if there is none.

        Raises:
            SandboxError: The program hung, crashed, or returned more than `max_output` bytes.
            UserError: The machine cannot confine programs.
        """
        answers: list[tuple[Any, str]] = []
        for status, output, error in self._request(source, function, list(inputs), max_output):
            if status == "timed out":
                raise SandboxError("timed out")
            if status != 0:
                raise SandboxError(_reason(status, error))
            try:
                result, message = json.loads(output)
            except (ValueError, TypeError, RecursionError) as failure:
                too_much = len(output.encode()) >= max_output
                raise SandboxError("returned too much output" if too_much else "returned invalid output") from failure
            answers.append((result, str(message)))
        return answers

    def close(self) -> None:
        """End the process. Repeated calls have no effect; the next use starts a new one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.5)
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _request(
        self, source: str, function: str | None, inputs: list[Any], longest: int
    ) -> list[tuple[Any, str, str]]:
        with self._lock:
            self._start()
            if not may_run_unconfined():
                self._layers.check()
            fields = {"source": source, "function": function, "inputs": inputs, "longest": longest}
            until = time.monotonic() + self.seconds + GRACE_SECONDS
            try:
                self._write({**fields, "seconds": self.seconds}, until)
                return [(status, output, error) for status, output, error in self._read(until)["results"]]
            except (OSError, EOFError, TimeoutError, ValueError, KeyError) as failure:
                self.close()
                timed_out = isinstance(failure, TimeoutError)
                raise SandboxError("timed out" if timed_out else "the sandbox ended") from failure

    def _start(self) -> None:
        """Start the process unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)  # other processes cannot read our memory and environment
        found = shutil.which("bwrap") if self.bubblewrap is None else self.bubblewrap
        reason = ""
        for bubblewrap in [found, ""] if found else [""]:
            self._spawn(bubblewrap)
            try:
                self._layers = Layers(**self._read(time.monotonic() + START_SECONDS)["layers"])
                return
            except (OSError, EOFError, TimeoutError, ValueError, TypeError, KeyError) as failure:
                self.close()  # bubblewrap may be forbidden
                timed_out = isinstance(failure, TimeoutError)
                reason = f"no answer in {START_SECONDS:g} s" if timed_out else "its process ended"
        raise UserError(
            f"The sandbox for code of a model does not start on this machine ({reason}); see 'robopolicy doctor'."
        )

    def _spawn(self, bubblewrap: str) -> None:
        settings = {
            "imports": self.imports,
            "memory_mib": self.memory_mib,
            "filter": (compute_only_filter() or b"").hex(),
            "bubblewrap": bool(bubblewrap),
            "root": tempfile.gettempdir(),
        }
        command = [sys.executable, "-I", "-S", str(_SERVER), json.dumps(settings)]
        if bubblewrap:
            command = [bubblewrap, *_NAMESPACES, "--", *command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,
            bufsize=0,
        )

    def _write(self, content: Any, until: float) -> None:
        assert self._process is not None and self._process.stdin is not None
        data = json.dumps(content).encode()
        data = memoryview(struct.pack("!I", len(data)) + data)
        handle = self._process.stdin.fileno()
        os.set_blocking(handle, False)
        while data:
            if not select.select([], [handle], [], max(0.0, until - time.monotonic()))[1]:
                raise TimeoutError
            data = data[os.write(handle, data) :]

    def _read(self, until: float) -> dict[str, Any]:
        (size,) = struct.unpack("!I", self._read_bytes(4, until))
        if size > FRAME_BYTES:
            raise ValueError("a frame is too large")
        return json.loads(self._read_bytes(size, until))

    def _read_bytes(self, size: int, until: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        handle, found = self._process.stdout.fileno(), bytearray()
        while len(found) < size:
            if not select.select([handle], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(handle, size - len(found))
            if not part:
                raise EOFError
            found += part
        return bytes(found)


def _reason(status: int, error: str) -> str:
    """Last line of the standard error, or the signal that ended the program."""
    lines = error.strip().splitlines()
    if lines:
        return lines[-1]
    return f"ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
