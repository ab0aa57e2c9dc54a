"""Tests of stop signals: the first waits for the next progress update, the second stops at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from robopolicy.cli.progress import hint_when_stopped

PROGRAM = """
import os, signal
from robopolicy.cli.progress import handle_stop_signals, progress_bars
signal.signal(signal.SIGINT, signal.default_int_handler)
handle_stop_signals()
with progress_bars() as add_bar:
    update = add_bar("wait", 2)
    update(1)
    for _ in range({times}):
        os.kill(os.getpid(), signal.{name})
    print("in between")
    update(2)
print("not reached")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGINT", -signal.SIGINT)])
@pytest.mark.parametrize(("times", "printed"), [(1, "in between\n"), (2, "")])
def test_a_stop_waits_for_the_next_update(name: str, code: int, times: int, printed: str) -> None:
    program = PROGRAM.format(name=name, times=times)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == printed
    assert done.returncode == code


SLOW = """
import os, signal, time
os.kill(os.getpid(), signal.{name})
try:
    for _ in range(20):
        time.sleep(0.01)
except BaseException:
    print("swallowed")
print("imported")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_stop_waits_until_modules_are_imported(name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW.format(name=name))
    program = (
        "import signal, time; from robopolicy.cli.progress import handle_stop_signals\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "handle_stop_signals(); import slow_module\n"
        "time.sleep(30); print('not reached')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.stdout == "imported\n"
    assert done.returncode == code


@pytest.mark.parametrize(("line", "printed"), [("go on with --resume", "go on with --resume\n"), ("", "")])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(143)])
def test_a_stopped_command_prints_how_to_resume(
    stop: BaseException, line: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(stop)), hint_when_stopped(lambda: line):
        raise stop
    assert capsys.readouterr().err == printed
