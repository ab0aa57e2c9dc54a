"""Tests of commands that build policies from other policies on a device: no tensor stays on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from device_commands import SEARCH, SMALL, check_acts_on_a_device, policies

from robopolicy.cli.main import main

FLOW, DIFFUSION, JUDGE = (f"runs/{name}/checkpoints/last" for name in ("flow", "diffusion", "qc"))
MADE = {
    "the weights of a composition": ["compose", FLOW, DIFFUSION, "--search", "grid", "--divisions", "2", *SEARCH],
    "a selector": ["compose", FLOW, DIFFUSION, "--gate-data", "demos", "--override", "selection.updates=5"],
    "a guided composition": ["compose", FLOW, DIFFUSION, "--critic", JUDGE, "--override", "guidance.strength=0.1"],
    "the best of several chunks": ["compose", FLOW, DIFFUSION, "--critic", JUDGE, "--override", "candidates=3"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with demonstrations and policies."""
    with policies(tmp_path_factory.mktemp("device"), ("flow", "diffusion")) as place:
        settings = ["task=point_mass", "dataset=demos", *SMALL, "algorithm=qc", "policy=flow", "name=qc"]
        assert main(["train", *settings, "replay.learning_starts=8", "sim.num_envs=2"]) == 0
        yield place


@pytest.mark.slow
@pytest.mark.parametrize("what", MADE)
def test_composed_policies_act_on_the_device(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_acts_on_a_device(MADE[what], folder, tmp_path, monkeypatch)
