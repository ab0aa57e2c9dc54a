"""Checks of commands that make policies from other policies, on the simulated device."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from robopolicy.cli.main import main

simulated = pytest.importorskip("simulated", exc_type=ImportError)
SMALL = ["policy.hidden=[8]", "budget.updates=2", "evaluation.episodes=0", "out=runs", f"device={simulated.NAME}"]
SEARCH = ["--episodes", "2", "--report-episodes", "2"]


@contextmanager
def policies(place: Path, heads: Sequence[str]) -> Iterator[Path]:
    """Change to `place` and make demonstrations and policies of the point mass there."""
    before = Path.cwd()
    os.chdir(place)
    try:
        assert main(["collect", "toy/point_mass", "--episodes", "4", "--out", "demos"]) == 0
        for head in heads:
            train = ["train", "task=point_mass", "dataset=demos", *SMALL]
            assert main([*train, "algorithm=bc", f"policy={head}", f"name={head}"]) == 0
        yield place
    finally:
        os.chdir(before)


def check_acts_on_a_device(words: Sequence[str], folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command on a device writes a policy that is evaluated on a device."""
    monkeypatch.chdir(folder)
    made, device = str(out / "made"), ["--device", simulated.NAME]
    assert main([*words, "--out", made, *device]) == 0
    assert main(["eval", made, "--episodes", "2", "--out", str(out / "report"), *device]) == 0
