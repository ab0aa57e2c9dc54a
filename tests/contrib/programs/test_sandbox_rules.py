"""Attacks on the sandbox: no program reads a secret, writes a file, reaches a socket or outlives its limits."""

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attacks import CONTROLS, ESCAPES, EXCESSES, PRELUDE

from robopolicy.contrib.programs.sandbox import runner
from robopolicy.contrib.programs.sandbox.runner import Sandbox, SandboxError
from robopolicy.errors import UserError

SECRET = "53CR37"
BUBBLEWRAP = shutil.which("bwrap")
MEANS = ["", *([BUBBLEWRAP] if BUBBLEWRAP else [])]
LIMIT = 0.3  # [s]

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the attacks use system calls of Linux on x86_64"
)


@contextmanager
def open_target():
    """Yield values for the programs: a folder, a file, a variable and a listener that every process may use."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as listener:
        folder = Path(name)
        folder.chmod(0o777)
        for file, text in (("secret", SECRET), ("victim", "x")):
            (folder / file).write_text(text)
            (folder / file).chmod(0o666)
        yield {"secret": folder / "secret", "folder": folder, "port": listener.getsockname()[1], "parent": os.getpid()}
        listener.settimeout(0.0)
        with suppress(BlockingIOError):
            listener.accept()
            pytest.fail("a program has connected")
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"secret": SECRET, "victim": "x"}


@pytest.fixture(scope="module")
def target():
    """Target of the sandboxed programs."""
    with pytest.MonkeyPatch.context() as patch, open_target() as values:
        patch.setenv("ROBOPOLICY_TOKEN", SECRET)
        yield values


@pytest.fixture(scope="module", params=MEANS, ids=lambda path: "bubblewrap" if path else "own namespaces")
def sandbox(request):
    """A sandbox with each means of making namespaces."""
    with Sandbox(seconds=LIMIT, bubblewrap=request.param) as sandbox:
        assert sandbox.layers.sufficient
        yield sandbox


def program(source, target):
    """The prelude and an attack."""
    for name, value in target.items():
        source = source.replace(f"{{{name}}}", str(value))
    return PRELUDE + source


SLOW_PARENTS = """import os, runpy, sys, time
fork = os.fork
def slow():
    child = fork()
    time.sleep(0.2 if child else 0.0)
    return child
os.fork = slow
runpy.run_path({server!r}, run_name="__main__")
"""


def test_a_sandbox_starts_when_its_root_changes_before_its_parent_continues(tmp_path, monkeypatch):
    with Sandbox(seconds=LIMIT, bubblewrap="") as sandbox:
        if not sandbox.layers.namespaces:
            pytest.skip("needs user namespaces")
    wrapper = tmp_path / "server.py"
    wrapper.write_text(SLOW_PARENTS.format(server=str(runner._SERVER)))
    monkeypatch.setattr(runner, "_SERVER", wrapper)
    with Sandbox(seconds=LIMIT, bubblewrap="") as sandbox:
        assert sandbox.layers.namespaces


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_leaves_the_sandbox(name, sandbox, target):
    start = time.monotonic()
    result = sandbox.run(program(ESCAPES[name], target))
    assert "ESCAPED" not in result.output and SECRET not in result.output + result.error
    assert time.monotonic() - start < LIMIT + 2.0
    assert sandbox.run("print(6 * 7)").output == "42\n"


@pytest.mark.parametrize("name", CONTROLS)
def test_an_attack_succeeds_without_the_sandbox(name):
    """Otherwise it would prove nothing."""
    libc = "import ctypes, io, os, posix, socket, subprocess, time, _thread, collections\nlibc = ctypes.CDLL(None)\n"
    with suppress(pytest.fail.Exception), open_target() as values:
        source = libc + program(ESCAPES[name], values)
        environment = {"ROBOPOLICY_TOKEN": SECRET}
        ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment)
    assert "ESCAPED" in ran.stdout, ran.stderr


@pytest.mark.parametrize("name", EXCESSES)
def test_limits_hold(name, sandbox):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    result = sandbox.run(PRELUDE + EXCESSES[name])
    assert time.monotonic() - start < LIMIT + 2.0
    assert len(result.output) <= 10_000 and len(result.error) <= 10_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # [KiB]
    assert sandbox.run("print(6 * 7)").output == "42\n"


def test_a_program_leaves_nothing_for_the_next_one(sandbox):
    leave = PRELUDE + "collections.left = builtins.left = modules['math'].pi = 3\ndef act(x): return 1"
    look = "import collections, math\ndef act(x): return [hasattr(collections, 'left'), math.pi]"
    assert sandbox.call(leave, "act", [0]) == [(1, "")]
    assert sandbox.call(look, "act", [0, 0]) == [([False, 3.141592653589793], "")] * 2
    count = "import math\ndef act(x):\n    math.n = getattr(math, 'n', 0) + 1\n    return math.n"
    assert [result for result, _ in sandbox.call(count, "act", [0] * 4)] == [1] * 4


@pytest.mark.parametrize(
    "forged",
    ["[9, '']", "]]", "\\0\\0\\0\\2{}", '{\\"results\\": [[0, \\"9\\", \\"\\"]]}'],
    ids=["answer", "end", "frame", "reply"],
)
def test_a_program_forges_no_answer_but_its_own(forged, sandbox):
    source = (
        PRELUDE
        + f'''
def act(x):
    if x == 1:
        for i in range(64):
            try:
                os.write(i, "{forged}".encode())
            except OSError:
                pass
    return x
'''
    )
    assert [result for result, _ in sandbox.call(source, "act", [2, 3])] == [2, 3]
    with pytest.raises(SandboxError):
        sandbox.call(source, "act", [2, 1, 3])
    assert [result for result, _ in sandbox.call(source, "act", [2, 3])] == [2, 3]


def test_large_inputs_are_written_with_a_deadline(sandbox):
    assert sandbox.call("def act(x): return len(x)", "act", ["x" * (4 << 20)]) == [(4 << 20, "")]


def process_groups(zombies: bool = True) -> set[str]:
    """Process groups that have a process, or one that still runs."""
    groups: set[str] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            state, _, group = path.read_text().rpartition(") ")[2].split()[:3]
            if zombies or state != "Z":
                groups.add(group)
    return groups


@pytest.mark.parametrize(
    ("server", "seconds", "reason"),
    [("raise SystemExit", 60.0, "its process ended"), ("import time; time.sleep(9)", 0.5, "no answer in 0.5 s")],
)
def test_a_sandbox_that_does_not_start_says_why(server, seconds, reason, tmp_path, monkeypatch):
    script = tmp_path / "server.py"
    script.write_text(server)
    monkeypatch.setattr(runner, "_SERVER", script)
    monkeypatch.setattr(runner, "START_SECONDS", seconds)
    with pytest.raises(UserError, match=rf"does not start on this machine \({reason}\)"):
        Sandbox(bubblewrap="").run("pass")


def test_no_process_survives_the_sandbox():
    sandbox = Sandbox(seconds=0.3)
    sandbox.run("while True: pass")
    process = sandbox._process
    assert process is not None
    sandbox.close()
    deadline = time.monotonic() + 10
    while str(process.pid) in process_groups() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert str(process.pid) not in process_groups()


def test_the_parent_that_dies_takes_the_sandbox_with_it():
    source = (
        "import os, threading, time\nfrom robopolicy.contrib.programs.sandbox.runner import Sandbox\n"
        "sandbox = Sandbox(seconds=30)\nsandbox.layers\nprint(sandbox._process.pid, flush=True)\n"
        "threading.Thread(target=sandbox.run, args=('while True: pass',)).start()\n"
        "time.sleep(0.3)\nos.kill(os.getpid(), 9)"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    group = ran.stdout.strip()
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        if group not in process_groups(zombies=False):
            return
        time.sleep(0.05)
    pytest.fail("the sandbox outlives its parent")
