"""Small jobs for tests of the queue; their processes import this module, so it imports no torch."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from robopolicy.training.queue import Job


def job(root: Path, name: str, work=None, **options) -> Job:
    """A job that writes `root/results/NAME` after `work(folder)`."""
    return Job(name, partial(_run, root, name, work or _nothing), partial(is_stored, root, name), **options)


def result(root: Path, name: str) -> Path:
    return root / "results" / name


def is_stored(root: Path, name: str) -> bool:
    return result(root, name).exists()


def order(root: Path) -> list[str]:
    """Names of the started jobs, one entry per start."""
    return (root / "order.txt").read_text().split()


def counting(folder: Path) -> int:
    """Count to 20 in steps that survive a kill; return the first step of this process."""
    steps = folder / "steps.txt"
    first = len(steps.read_text()) if steps.exists() else 0
    for _ in range(first, 20):
        with steps.open("a") as stream:
            stream.write("x")
        time.sleep(0.05)
    return first


def waiting(folder: Path) -> None:
    (folder / "ready").touch()
    while not (folder / "release").exists():
        time.sleep(0.02)


def failing(folder: Path) -> None:
    sys.stdout.write("about to divide\n")
    raise ValueError("of no\nuse")


def threads(folder: Path) -> str:
    return f"{os.environ['OMP_NUM_THREADS']} {os.nice(0)}"


def leaving(folder: Path) -> None:
    os._exit(3)


def killing_itself(folder: Path) -> None:
    os.kill(os.getpid(), 9)


def sleeping(folder: Path) -> None:
    time.sleep(60)


def stubborn(folder: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: (folder / "warned").touch())
    (folder / "ready").touch()
    while True:
        time.sleep(0.05)


def _nothing(folder: Path) -> None:
    pass


def _run(root: Path, name: str, work, folder: Path) -> None:
    with (root / "order.txt").open("a") as stream:
        stream.write(f"{name}\n")
    found = work(folder)
    place = result(root, name)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(str(found))
