"""Tests of episodes for views: frames, predicted chunks, and replays of datasets."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.physics_state import MujocoState
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.viewer.dataset_episodes import DatasetEpisodes
from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.sim_episodes import SimEpisodes


class Sweep:
    """Actor with chunks of 6 equal actions, of which 4 are executed."""

    action_horizon, obs_horizon, network_calls, policy_calls = 4, 1, 0, 0

    def __call__(self, sim, obs, rows, seeds, decisions):
        sign = 1.0 if int(decisions[0]) % 2 == 0 else -1.0
        return (0.3 * sign * torch.ones(1, 6, sim.spec.action_dim)).clamp(sim.spec.action_low, sim.spec.action_high)


def lift() -> VectorSim:
    return make_sim("lift", SimOptions(num_envs=1))


def expert() -> ExpertActor:
    return ExpertActor(get_task("lift").require_expert()())


def positions(frames: list[EpisodeFrame] | tuple[MujocoState, ...]) -> np.ndarray:
    states = [frame.state if isinstance(frame, EpisodeFrame) else frame for frame in frames]
    assert all(isinstance(state, MujocoState) for state in states)
    return np.stack([state.qpos for state in states])


@pytest.fixture(scope="module")
def demonstrations() -> Iterator[list[EpisodeFrame]]:
    """Frames of an episode of the expert."""
    source = SimEpisodes("expert", lift(), expert, seed=7)
    yield list(source.frames(2))
    source.close()


def test_frames_hold_the_result_of_the_step_before(demonstrations: list[EpisodeFrame]) -> None:
    rewards = [frame.reward for frame in demonstrations]
    assert rewards[0] == 0.0 and sum(rewards) == 1.0 and demonstrations[-1].success is True
    assert demonstrations[0].success is None and demonstrations[1].success is False
    assert all(frame.plan == () for frame in demonstrations)  # single actions predict nothing
    assert set(demonstrations[1].vectors) == {"state", "action"}


def test_episodes_start_from_their_seed(demonstrations: list[EpisodeFrame]) -> None:
    source = SimEpisodes("expert", lift(), expert, seed=9)
    assert source.label(0) == "seed 9"
    again = list(source.frames(0))  # the same seed as episode 2 from seed 7
    np.testing.assert_array_equal(positions(again), positions(demonstrations))
    source.close()


def test_chunks_are_predicted_to_their_end() -> None:
    source = SimEpisodes("sweep", lift(), Sweep, seed=0, predictor=lift())
    frames = [frame for frame, _ in zip(source.frames(0), range(9), strict=False)]
    first, second = frames[0].plan, frames[4].plan
    assert [frame.plan is first for frame in frames[:5]] == [True, True, True, True, False]
    assert len(first) == len(second) == 7  # the state before the chunk and after each of its 6 actions
    np.testing.assert_allclose(positions(first)[:5], positions(frames[:5]), atol=1e-9)
    np.testing.assert_allclose(positions(second)[0], positions(frames)[4], atol=1e-9)
    source.close()


def test_without_a_predictor_the_executed_actions_are_the_plan() -> None:
    source = SimEpisodes("sweep", lift(), Sweep, seed=0)
    frames = [frame for frame, _ in zip(source.frames(0), range(9), strict=False)]
    np.testing.assert_array_equal(positions(frames[0].plan), positions(frames[:5]))
    source.close()


def test_simulators_that_cannot_save_their_state_predict_nothing() -> None:
    sims = [make_sim("gymnasium/Hopper-v5", SimOptions(num_envs=1)) for _ in range(2)]
    source = SimEpisodes("sweep", sims[0], Sweep, predictor=sims[1])
    assert len(next(source.frames(0)).plan) == 5
    source.close()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two demonstrations of lift from seed 7 on."""
    folder = tmp_path_factory.mktemp("data") / "lift"
    sim = lift()
    with LeRobotWriter(folder, control_dt=sim.spec.control_dt) as writer:
        collect(sim, get_task("lift").require_expert()(), writer, episodes=2, seed=7)
    sim.close()
    return folder


def test_datasets_are_replayed_in_their_simulator(dataset: Path) -> None:
    source = DatasetEpisodes(dataset, lambda task: make_sim(task, SimOptions(num_envs=1)))
    live = SimEpisodes("expert", lift(), expert, seed=7)
    replayed, expected = list(source.frames(1)), list(live.frames(1))
    assert (source.num_episodes, source.label(1)) == (2, "episode 1, success")
    np.testing.assert_allclose(positions(replayed), positions(expected), atol=1e-4)  # actions are stored as float32
    assert [frame.reward for frame in replayed] == [frame.reward for frame in expected]
    assert source.note() == ""
    for each in (source, live):
        each.close()


def test_replays_that_differ_are_marked(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DatasetEpisodes(dataset, lambda task: make_sim(task, SimOptions(num_envs=1)))
    episode = Episodes.episode

    def altered(self, index):
        found = episode(self, index)
        found.arrays["action"] = -found.arrays["action"]
        return found

    monkeypatch.setattr(Episodes, "episode", altered)
    list(source.frames(0))
    assert source.note().startswith("The replay differs from the recorded observations by up to ")
    source.close()


def test_datasets_of_a_task_with_other_observations_are_shown(dataset: Path) -> None:
    class Wider:
        """The task with one more entry in every vector."""

        def __init__(self, sim: VectorSim) -> None:
            self._sim = sim

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sim, name)

        def reset(self, seeds: Any) -> dict[str, torch.Tensor]:
            return self._widened(self._sim.reset(seeds))

        def step(self, actions: torch.Tensor) -> Any:
            result = self._sim.step(actions)
            return replace(result, obs=self._widened(result.obs))

        @staticmethod
        def _widened(obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {key: torch.cat([value, value[:, :1]], 1) for key, value in obs.items()}

    source = DatasetEpisodes(dataset, lambda task: cast(VectorSim, Wider(lift())))
    frames = list(source.frames(0))
    assert all(frame.state is not None for frame in frames)
    assert source.note().startswith("The task has other observations now")
    source.close()


def test_datasets_of_unknown_tasks_are_shown_without_bodies(dataset: Path) -> None:
    def refuse(task: str) -> VectorSim:
        raise UserError("unknown task")

    source = DatasetEpisodes(dataset, refuse)
    frames = list(source.frames(0))
    assert all(frame.state is None for frame in frames) and len(frames[0].vectors["action"]) == 5
    assert source.note() == "There is no simulator of 'manipulation/lift' with 5 actions, so there is no 3D view."
