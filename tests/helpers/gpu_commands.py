"""Checks of commands that make policies from other policies, on an emulated GPU."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from emulated_gpu import emulated_gpu

from robopolicy.algorithms.common.on_policy import BackgroundWorker
from robopolicy.cli.main import main

SMALL = ["policy.hidden=[8]", "budget.updates=2", "evaluation.episodes=0", "out=runs"]
SEARCH = ["--episodes", "2", "--report-episodes", "2"]


def run(*argv: str) -> None:
    """Run a command on the emulated GPU."""
    with emulated_gpu():
        assert main(list(argv)) == 0, argv


@contextmanager
def policies(place: Path, heads: Sequence[str]) -> Iterator[Path]:
    """Change to `place` and make demonstrations and policies of the point mass there."""
    before = Path.cwd()
    os.chdir(place)
    try:
        run("collect", "toy/point_mass", "--episodes", "4", "--out", "demos")
        for head in heads:
            train = ["train", "task=point_mass", "dataset=demos", "device=cuda", *SMALL]
            run(*train, "algorithm=bc", f"policy={head}", f"name={head}")
        yield place
    finally:
        os.chdir(before)


def check_plays_on_a_gpu(words: Sequence[str], folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command on a GPU writes a policy that evaluates on a GPU."""
    monkeypatch.setattr(BackgroundWorker, "MIN_PARALLEL_WORK", float("inf"))  # torch function modes are per thread
    monkeypatch.chdir(folder)
    made = str(out / "made")
    run(*words, "--out", made, "--device", "cuda")
    run("eval", made, "--episodes", "2", "--out", str(out / "report"), "--device", "cuda")
