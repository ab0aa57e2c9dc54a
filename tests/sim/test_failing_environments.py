"""Tests of Gymnasium environments that raise errors or return non-finite numbers."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.errors import SimulatorFailed
from robopolicy.evaluation.actors import RandomActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.training.compose import compose_config
from robopolicy.training.runs import resume_run, start_run

ID = "Fragile-v0"
TASK = f"gymnasium/{ID}"
RUN = ["algorithm=ppo", "policy=gaussian", "policy.hidden=[8]", "chunk.horizon=1", "chunk.action_horizon=1"]
RUN += ["sim.num_envs=2"]
SHORT = ["algorithm.num_steps=8", "budget.updates=20", "checkpoint_every=20"]


class Fragile(gymnasium.Env[Any, Any]):
    """Counts its steps in episodes of five; `spoil(calls, seed)` may override parts of a step's result."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    spoil: Callable[[int, int], dict[str, Any]] = staticmethod(lambda calls, seed: {})
    calls = 0

    def __init__(self) -> None:
        """Takes no `render_mode`."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count, self.seed = 0, seed or 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.count += 1
        Fragile.calls += 1
        given = {"obs": np.full(2, self.count, np.float32), "reward": 1.0} | self.spoil(Fragile.calls, self.seed)
        return given["obs"], given["reward"], False, self.count == 5, {"success": self.count == 5}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gymnasium.register(
        ID, entry_point=lambda **options: Fragile(**options), max_episode_steps=5, disable_env_checker=True
    )
    monkeypatch.setattr(Fragile, "calls", 0)
    yield
    del gymnasium.registry[ID]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], dict[str, Any]]], None]:
    """Sets the function that overrides step results."""
    return lambda given: monkeypatch.setattr(Fragile, "spoil", staticmethod(given))


def breaking(last: int) -> Callable[[int, int], dict[str, Any]]:
    """Raises after `last` steps, counted over all environments."""

    def give(calls: int, seed: int) -> dict[str, Any]:
        if calls > last:
            raise RuntimeError("motor 3\noverheated")
        return {}

    return give


@pytest.mark.parametrize("wrong", [{"reward": math.nan}, {"reward": -math.inf}, {"obs": np.array([0, math.inf])}])
def test_non_finite_numbers_end_only_the_episode_of_their_row(wrong: dict[str, Any], spoil: Any) -> None:
    spoil(lambda calls, seed: wrong if calls == 4 else {})
    sim = GymnasiumSim(ID, 2)
    sim.reset(0)
    action = torch.zeros(2, 1)
    assert sim.step(action).info["diverged"].tolist() == [False, False]
    step = sim.step(action)
    assert step.info["diverged"].tolist() == step.terminated.tolist() == [False, True]
    assert step.info["success"].tolist() == [False, False]
    assert step.reward.tolist() == [1.0, 0.0]
    assert step.final_obs["state"].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    assert step.obs["state"].tolist() == [[2.0, 2.0], [0.0, 0.0]]
    assert sim.episode_seed.tolist() == [0, 2]
    assert sim.step(action).reward.tolist() == [1.0, 1.0]


def test_evaluation_counts_diverged_episodes(spoil: Any) -> None:
    spoil(lambda calls, seed: {"reward": math.nan} if seed == 1 else {})
    sim = GymnasiumSim(ID, 2)
    result = evaluate(RandomActor(), sim, episodes=4, seed=0)
    assert result.returns.tolist() == [5.0, 0.0, 5.0, 5.0]
    assert (result.diverged, result.summary()["diverged"]) == (1, 1)
    assert "1 of 4 episodes ended because the simulation diverged." in result.warnings()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"obs": np.zeros(3)}, "in step 1 of the episode with seed 7: ValueError: 'state' must have the shape"),
        ({"reward": "good"}, "in step 1 of the episode with seed 7: ValueError: could not convert string to float"),
        ({"reward": None}, "in step 1 of the episode with seed 7: TypeError: float"),
    ],
)
def test_values_that_do_not_fit_the_spaces_are_reported(wrong: dict[str, Any], reason: str, spoil: Any) -> None:
    spoil(lambda calls, seed: wrong)
    sim = GymnasiumSim(ID, 1)
    sim.reset(7)
    with pytest.raises(SimulatorFailed, match=reason):
        sim.step(torch.zeros(1, 1))


def test_exception_is_reported_in_one_line_with_its_location(spoil: Any) -> None:
    spoil(breaking(2))
    sim = GymnasiumSim(ID, 1)
    sim.reset(3)
    for _ in range(2):
        sim.step(torch.zeros(1, 1))
    words = r"^Task Fragile-v0 failed in step 3 of the episode with seed 3: RuntimeError: motor 3 overheated "
    with pytest.raises(SimulatorFailed, match=words + r"\(test_failing_environments.py, line \d+\).$"):
        sim.step(torch.zeros(1, 1))


def test_system_exit_in_an_environment_becomes_simulator_failed(spoil: Any) -> None:
    def leave(calls: int, seed: int) -> dict[str, Any]:
        raise SystemExit(7)

    spoil(leave)
    sim = GymnasiumSim(ID, 1)
    sim.reset(0)
    with pytest.raises(SimulatorFailed, match="in step 1 of the episode with seed 0: SystemExit: 7"):
        sim.step(torch.zeros(1, 1))


def test_construction_failure_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    def refuse(self: Fragile) -> None:
        raise RuntimeError("no license found")

    monkeypatch.setattr(Fragile, "__init__", refuse)
    assert f"Task {TASK} failed at its start: RuntimeError: no license found" in refused(
        "train", f"task={TASK}", *RUN, *SHORT
    )


def test_non_finite_first_observation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fragile, "reset", lambda self, **options: (np.full(2, math.nan), {}))
    with pytest.raises(SimulatorFailed, match=r"at the start of the episode with seed 5.*first observation is not fin"):
        GymnasiumSim(ID, 1).reset(5)


def test_training_progress_before_a_failure_is_saved(tmp_path: Path, spoil: Any) -> None:
    config = compose_config([f"task={TASK}", *RUN, *SHORT, "evaluation.episodes=0", f"out={tmp_path}", "name=run"])
    spoil(breaking(100))
    with pytest.raises(SimulatorFailed, match=r"overheated .* Resume with: robopolicy train --resume .*run$"):
        start_run(config).train()
    spoil(lambda calls, seed: {})
    resumed = resume_run(tmp_path / "run")
    assert resumed.update == 6  # 16 steps per update
    resumed.train()
    assert json.loads((tmp_path / "run" / "report.json").read_text())["update"] == 20


def test_run_that_fails_before_its_first_update_leaves_no_files(tmp_path: Path, spoil: Any) -> None:
    config = compose_config([f"task={TASK}", *RUN, *SHORT, "evaluation.episodes=0", f"out={tmp_path}", "name=run"])
    spoil(breaking(3))
    with pytest.raises(SimulatorFailed, match="overheated"):
        start_run(config).train()
    assert list(tmp_path.iterdir()) == []


def test_episodes_collected_before_a_failure_are_saved(
    tmp_path: Path, spoil: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "set"
    spoil(breaking(12))
    assert main(["collect", TASK, "--policy", "random", "--episodes", "4", "--num-envs", "1", "--out", str(out)]) == 2
    assert f"). {out} contains the 2 episodes recorded before." in capsys.readouterr().err
    assert read_lerobot(out).seeds.tolist() == [0, 1]
