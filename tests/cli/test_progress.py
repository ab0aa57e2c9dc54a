"""A stop request survives code that swallows exceptions."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal
from robopolicy.cli.progress import listen_for_stop, progress_bars
signal.signal(signal.SIGINT, signal.default_int_handler)
listen_for_stop()
with progress_bars() as add_bar:
    update = add_bar("wait", 2)
    update(1)
    try:
        os.kill(os.getpid(), signal.{name})
    except BaseException:
        print("swallowed")
    update(2)
print("not reached")
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", -signal.SIGINT)])
def test_a_swallowed_stop_is_raised_again(name: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "swallowed\n"
    assert done.returncode == code
