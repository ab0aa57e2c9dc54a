"""Tests of command-line runs with known dynamics: training, bit-identical resume, and refused settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from resumed_runs import assert_identical, interrupted_at

from robopolicy.cli.main import main
from robopolicy.contrib.known_dynamics.scenario_source import ScenarioSource
from robopolicy.sim.registry import SimOptions, make_sim

SETTINGS = [
    "policy=squashed_gaussian",
    "policy.hidden=[16]",
    "sim.num_envs=4",
    "checkpoint_every=2",
    "logging.every=1",
    "evaluation.episodes=2",
    "evaluation.every=4",
    "budget.updates=4",
]


@pytest.mark.parametrize(("task", "algorithm", "scenarios"), [("newsvendor", "hdpo", 10), ("reservoir", "ts_ddr", 0)])
def test_a_run_resumes_bit_identically(
    task: str, algorithm: str, scenarios: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if task == "reservoir":
        pytest.importorskip("clarabel")
    settings = [f"task={task}", f"algorithm={algorithm}", f"algorithm.scenarios={scenarios}", *SETTINGS]
    stopped = interrupted_at(2, settings, tmp_path, monkeypatch)
    assert main(["train", *settings, f"out={tmp_path}", "name=straight"]) == 0
    assert_identical(stopped, tmp_path / "straight")
    last = str(stopped / "checkpoints" / "last")
    assert main(["eval", last, "--episodes", "2", "--out", str(tmp_path / "eval")]) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task=point_mass", "algorithm=hdpo"], "differentiates through known dynamics"),
        (["task=newsvendor", "algorithm=ts_ddr"], "plans with linear dynamics"),
        (["task=newsvendor", "algorithm=hdpo", "algorithm.scenarios=3"], "does not fill a batch"),
        (["task=newsvendor", "algorithm=hdpo", "budget.updates=0", "budget.env_steps=100"], "set budget.updates"),
    ],
)
def test_incompatible_settings_are_refused_in_one_line(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SETTINGS, *settings, f"out={tmp_path}"]) == 2
    assert message in capsys.readouterr().err


def test_a_pass_visits_every_scenario_once_and_fresh_scenarios_never_repeat() -> None:
    sim = make_sim("newsvendor", SimOptions(num_envs=4))

    class Learner:
        name = "hdpo"

    def sampled_states(scenarios: int) -> torch.Tensor:
        learner: object = Learner()
        source = ScenarioSource(sim, learner, torch.device("cpu"), scenarios=scenarios, obs_horizon=1, seed=7)  # type: ignore[arg-type]
        return torch.cat([source.next(learner).state for _ in range(4)]).flatten()  # type: ignore[arg-type]

    fixed, fresh = sampled_states(8), sampled_states(0)
    assert len(fixed[:8].unique()) == 8 and torch.equal(fixed[:8].sort()[0], fixed[8:].sort()[0])
    assert not torch.equal(fixed[:8], fixed[8:])
    assert len(fresh.unique()) == 16
