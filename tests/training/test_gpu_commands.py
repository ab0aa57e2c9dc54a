"""Commands that make policies of other policies leave nothing of them on the CPU while they compute on a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_gpu import emulated_gpu

from robopolicy.algorithms.frames.on_policy import Beside
from robopolicy.cli.main import main

SMALL = ["policy.hidden=[8]", "budget.updates=2", "evaluation.episodes=0", "out=runs"]
SEARCH = ["--episodes", "2", "--report-episodes", "2"]
BRAKE = {"kind": "action", "control": ["clip(-2 * state[2:4], -1, 1)"]}
STAGES = {"kind": "selector", "children": [{"kind": "action", "skill": "go", "until": "state[0] < 0.3"}, BRAKE]}
FLOW, DIFFUSION, GAUSSIAN, JUDGE = (f"runs/{name}/checkpoints/last" for name in ("flow", "diffusion", "gaussian", "qc"))
MADE = {
    "the weights of a composition": ["compose", FLOW, DIFFUSION, "--search", "grid", "--divisions", "2", *SEARCH],
    "a selector": ["compose", FLOW, DIFFUSION, "--select", "demos", "--set", "selection.updates=5"],
    "a guided composition": ["compose", FLOW, DIFFUSION, "--critic", JUDGE, "--set", "guidance.strength=0.1"],
    "the best of several chunks": ["compose", FLOW, DIFFUSION, "--critic", JUDGE, "--set", "candidates=3"],
    "a smaller network": ["compress", GAUSSIAN, "--widths", "4", "--seen-episodes", "2", "--final-updates", "2"],
    "a tree of formulas": ["program", "brake.json", "--task", "toy/point_mass"],
    "a tree that is changed": ["program", "stages.json", "--skills", f"go={FLOW}", "--rounds", "1", *SEARCH],
}


def run(*argv: str) -> None:
    with emulated_gpu():
        assert main(list(argv)) == 0, argv


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with demonstrations, policies and trees."""
    place, before = tmp_path_factory.mktemp("gpu"), Path.cwd()
    os.chdir(place)
    try:
        run("collect", "toy/point_mass", "--episodes", "4", "--out", "demos")
        train = ["train", "task=point_mass", "dataset=demos", "device=cuda", *SMALL]
        for head in ("flow", "diffusion", "gaussian"):
            run(*train, "algorithm=bc", f"policy={head}", f"name={head}")
        run(*train, "algorithm=qc", "policy=flow", "name=qc", "replay.warmup_steps=8", "sim.num_envs=2")
        Path("brake.json").write_text(json.dumps(BRAKE))
        Path("stages.json").write_text(json.dumps(STAGES))
        yield place
    finally:
        os.chdir(before)


@pytest.mark.parametrize("what", MADE)
def test_what_is_made_of_policies_on_a_gpu_plays_there(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Beside, "SMALLEST", float("inf"))  # a mode of torch holds for one thread
    monkeypatch.chdir(folder)
    made = str(tmp_path / "made")
    run(*MADE[what], "--out", made, "--device", "cuda")
    run("eval", made, "--episodes", "2", "--out", str(tmp_path / "report"), "--device", "cuda")
