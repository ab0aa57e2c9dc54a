"""Tests of commands that build policies from other policies on a GPU: no tensor stays on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_commands import SEARCH, SMALL, check_plays_on_a_gpu, policies, run

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
    with policies(tmp_path_factory.mktemp("gpu"), ("flow", "diffusion")) as place:
        train = ["train", "task=point_mass", "dataset=demos", "device=cuda", *SMALL]
        run(*train, "algorithm=qc", "policy=flow", "name=qc", "replay.learning_starts=8", "sim.num_envs=2")
        yield place


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what == "a selector" else pytest.mark.slow) for what in MADE]
)
def test_composed_policies_act_on_the_gpu(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_plays_on_a_gpu(MADE[what], folder, tmp_path, monkeypatch)
