"""Tests of DAgger: rounds of corrections by the expert and by a person, and what the policy learns from them."""

from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scripted_device import ScriptedTeleop

from robopolicy.algorithms.dagger import DAggerConfig
from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode
from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.schema import to_dict
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.teleop.contract import STOP, SUCCESS, TeleopCommand
from robopolicy.teleop.devices import DEVICES
from robopolicy.training.build import RunComponents, build, resolve_config
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.config import BudgetConfig, EvaluationConfig, SimConfig, TrainConfig
from robopolicy.training.correction_source import CorrectionSource


class Episodic(list):
    def add(self, episode: Episode) -> None:
        self.append(episode)


class Leftward:
    """Policy that always accelerates to the left."""

    def __call__(self, sim, obs):
        return torch.tensor([-1.0, 0.0]).expand(sim.num_envs, 2)


class Person(ScriptedTeleop):
    """Act on the last three of every five steps, and end every episode after five."""

    @classmethod
    def open(cls, argument: str = "") -> "Person":
        end = STOP if argument == "stop" else SUCCESS
        return cls(lambda k: TeleopCommand(k % 6 > 1, events=(end,) * (k % 6 == 5)))


@pytest.fixture(autouse=True)
def person(monkeypatch):
    monkeypatch.setitem(DEVICES._rows, "person", Person)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Demonstrations of the expert and an untrained policy."""
    with closing(make_sim("point_mass", SimOptions(num_envs=2))) as sim:
        with LeRobotWriter(tmp_path / "data", control_dt=sim.spec.control_dt) as writer:
            collect(sim, get_task("point_mass").require_expert()(), writer, episodes=2)
        obs = {"state": sim.reset(0)["state"][:, None]}
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), normalization="identity"), PolicySpec({"state": (6,)}, 2))
    save_checkpoint(tmp_path / "policy", policy, task="toy/point_mass", obs_sample=obs)
    return tmp_path


def make(place: Path, num_envs: int = 2, **settings) -> RunComponents:
    config = TrainConfig(
        algorithm={
            "name": "dagger",
            **to_dict(DAggerConfig(batch_size=16, rounds=2, episodes_per_round=3, **settings)),
        },
        sim=SimConfig(num_envs=num_envs),
        budget=BudgetConfig(updates=6),
        evaluation=EvaluationConfig(episodes=0),
        init_from=str(place / "policy"),
        dataset=str(place / "data"),
    )
    return build(resolve_config(config))


def steps(parts: RunComponents, count: int) -> list[int]:
    """Number of frames of the stream after each of some updates."""
    sizes = []
    assert isinstance(parts.source, CorrectionSource)
    for _ in range(count):
        parts.algorithm.update(parts.source.next(parts.algorithm))
        sizes.append(len(parts.source._source.sampler))
    return sizes


def test_the_expert_labels_the_states_that_the_policy_visits():
    with closing(make_sim("point_mass", SimOptions(num_envs=2))) as sim:
        expert, sink = get_task("point_mass").require_expert()(), Episodic()
        collect(sim, expert, sink, episodes=2, only_success=False, acting=Leftward())
        (episode, _) = sink
        assert (episode.arrays["executed"] == [-1, 0]).all()
        obs = {"state": torch.from_numpy(episode.arrays["state"])}
        labels = expert(sim, obs).clamp(sim.spec.action_low, sim.spec.action_high).numpy()
        np.testing.assert_allclose(episode.arrays["action"], labels, atol=1e-6)


def test_rounds_are_spread_over_the_updates_and_add_frames(place):
    with closing(make(place)) as parts:
        sizes = steps(parts, 6)
        assert sizes[0] == sizes[2] < sizes[3] == sizes[5]
        metrics = parts.source.metrics()
        assert (
            metrics["dagger/rounds"] == 2 and metrics["dagger/corrected"] == 1 and 0 <= metrics["dagger/success"] <= 1
        )
        assert parts.source.env_steps == sum(len(part) for part in parts.source._corrections)
        seeds = np.concatenate([part.seeds for part in parts.source._corrections])
        assert len(set(seeds)) == 6 and seeds.min() >= 1_000_000, "unused seeds of training"


def test_only_frames_of_the_person_are_added(place):
    with closing(make(place, num_envs=1, demonstrator="person")) as parts:
        demonstrations = len(parts.source._demonstrations)
        assert steps(parts, 1) == [demonstrations + 3 * 3]
        (round_,) = parts.source._corrections
        assert round_.arrays["intervention"].tolist() == [False, False, True, True, True] * 3
        assert parts.source.metrics()["dagger/corrected"] == pytest.approx(0.6)


def test_a_run_continues_with_its_corrections(place):
    with closing(make(place)) as saved, closing(make(place)) as restored:
        steps(saved, 4)
        restored.algorithm.load_state_dict(deepcopy(saved.algorithm.state_dict()))
        assert restored.source.load_state_dict(saved.source.state_dict())
        for run in (saved, restored):
            torch.manual_seed(3)
            assert steps(run, 2)[-1] == len(saved.source._source.sampler)
        first, second = (run.policy.state_dict() for run in (saved, restored))
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_unsuitable_settings_are_refused(place):
    with pytest.raises(UserError, match=r"A person corrects one environment; set sim\.num_envs=1"):
        make(place, demonstrator="person")
    with (
        pytest.raises(UserError, match="ended before an episode was recorded"),
        closing(make(place, num_envs=1, demonstrator="person:stop")) as parts,
    ):
        steps(parts, 1)
    settings = {"name": "dagger", **to_dict(DAggerConfig())}
    config = TrainConfig(algorithm=settings, init_from=str(place / "policy"), budget=BudgetConfig(updates=1))
    with pytest.raises(UserError, match="'dagger' also needs demonstrations"):
        resolve_config(config)
    with pytest.raises(UserError, match=r"set budget\.updates instead"):
        resolve_config(replace(config, dataset=str(place / "data"), budget=BudgetConfig(env_steps=9)))
