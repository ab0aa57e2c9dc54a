"""Tests of check_simulator: no problems on valid simulators, a specific message for each violation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from slider import Slider, make_slider_env
from torch import Tensor

from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.contract import Observation, Step, VectorSim


@pytest.mark.parametrize("engine", ["rollout", "exact"])
def test_native_backend_passes(engine: Any) -> None:
    def make(num_envs: int) -> VectorSim:
        return MujocoSim(Slider(0.2), num_envs, engine=engine)

    assert check_simulator(make(3), make) == []


def test_gymnasium_backend_passes() -> None:
    def make(num_envs: int) -> VectorSim:
        return GymnasiumSim(make_slider_env, num_envs)

    assert check_simulator(make(3), make) == []


class Broken(MujocoSim):
    """A valid simulator whose step results a test corrupts."""

    spoil: Callable[["Broken", Step, Tensor | None], Step]

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        return type(self).spoil(self, super().step(action, active), active)


def broken(spoil: Callable[[Broken, Step, Tensor | None], Step]) -> list[str]:
    kind = type("Spoiled", (Broken,), {"spoil": staticmethod(spoil)})
    return check_simulator(kind(Slider(0.2), 3))


def noisy(sim: Broken, step: Step, active: Tensor | None) -> Step:
    return replace(step, reward=step.reward + torch.rand(3))


def wide(sim: Broken, step: Step, active: Tensor | None) -> Step:
    return replace(step, reward=step.reward.double()[:, None])


def hidden_end(sim: Broken, step: Step, active: Tensor | None) -> Step:
    return replace(step, final_obs=step.obs)


def infinite(sim: Broken, step: Step, active: Tensor | None) -> Step:
    return replace(step, obs={"state": step.obs["state"] / 0.0})


def endless(sim: Broken, step: Step, active: Tensor | None) -> Step:
    never = torch.zeros(3, dtype=torch.bool)
    return replace(step, terminated=never, truncated=never)


def paid_waiting(sim: Broken, step: Step, active: Tensor | None) -> Step:
    return step if active is None else replace(step, reward=step.reward + 1)


_shared = torch.zeros(3)


def reused(sim: Broken, step: Step, active: Tensor | None) -> Step:
    return replace(step, reward=_shared.copy_(step.reward))


@pytest.mark.parametrize(
    ("spoil", "lesson"),
    [
        (noisy, "same seed and actions differ"),
        (wide, "reward must be torch.float32"),
        (hidden_end, "bootstrap from the wrong state"),
        (infinite, "NaN or infinite"),
        (endless, "No episode was truncated"),
        (paid_waiting, "reward 0 and both flags False"),
        (reused, "overwritten by a later one"),
    ],
)
def test_checker_reports_each_violation(spoil: Callable[[Broken, Step, Tensor | None], Step], lesson: str) -> None:
    problems = broken(spoil)
    assert any(lesson in problem for problem in problems), problems


def test_checker_reports_wrong_observations_and_seeds() -> None:
    class Wrong(MujocoSim):
        def reset(self, seed: Any = 0) -> Observation:
            return {"state": super().reset(seed)["state"].double()[:, :2], "extra": torch.zeros(3)}

    problems = check_simulator(Wrong(Slider(), 3))
    assert any("keys" in problem for problem in problems)
    assert any("shape" in problem for problem in problems)
    assert any("torch.float64" in problem for problem in problems)

    class Unseeded(MujocoSim):
        def reset(self, seed: Any = 0) -> Observation:
            return super().reset(0)

    assert any("episode s + i" in problem for problem in check_simulator(Unseeded(Slider(), 3)))


def test_checker_reports_an_incomplete_state() -> None:
    class Forgetful(MujocoSim):
        def load_state_dict(self, state: Any) -> Observation:
            self.reset(0)
            return super().load_state_dict({**state, "engine": self.state_dict()["engine"]})

    assert any("load_state_dict" in problem for problem in check_simulator(Forgetful(Slider(0.2), 3)))
