"""Tests of episode ends: hand-computed returns across automatic resets on native, warp and gymnasium backends."""

from collections.abc import Callable

import pytest
import torch
from slider import Slider, make_slider_env

from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.warp import WarpSim
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import VectorSim

BACKENDS: dict[str, Callable[[int], VectorSim]] = {
    "rollout": lambda n: MujocoSim(Slider(), n, engine="rollout"),
    "exact": lambda n: MujocoSim(Slider(), n, engine="exact"),
    "warp": lambda n: WarpSim(Slider(), n, device="cpu"),
    "gymnasium": lambda n: GymnasiumSim(make_slider_env, n, task="test/slider"),
}
ACTIONS = torch.tensor([[1.0], [0.5], [0.6], [0.0], [0.0]])


@pytest.fixture(params=["rollout", "exact", pytest.param("warp", marks=pytest.mark.compiles), "gymnasium"])
def make(request: pytest.FixtureRequest) -> Callable[[int], VectorSim]:
    if request.param == "warp":
        pytest.importorskip("mujoco_warp")
    return BACKENDS[request.param]


def test_rewards_flags_and_final_observations_match_hand_computed_values(make: Callable[[int], VectorSim]) -> None:
    sim = make(5)
    sim.reset(10)
    steps = [sim.step(ACTIONS) for _ in range(4)]
    reward = torch.stack([step.reward for step in steps])[:, :3]
    expected = torch.tensor([[1, 0.5, 0.6], [3, 1.5, 1.8], [6, 3, 3.6], [1, 5, 6]])  # row 0 starts its second episode
    torch.testing.assert_close(reward, expected)
    assert [step.terminated.tolist()[:3] for step in steps[2:]] == [[True, False, False], [False, False, True]]
    assert [step.truncated.tolist()[:3] for step in steps[2:]] == [[False] * 3, [False, True, True]]
    torch.testing.assert_close(steps[2].final_obs["state"][0], torch.tensor([6.0, 3.0, 3.0]))
    torch.testing.assert_close(steps[2].obs["state"][0], torch.zeros(3))
    torch.testing.assert_close(steps[3].final_obs["state"][1], torch.tensor([5.0, 2.0, 4.0]))
    torch.testing.assert_close(steps[3].obs["state"][1:3], torch.zeros(2, 3))
    assert steps[3].info["success"].tolist()[:3] == [False, False, True]


def test_later_episodes_take_unused_seeds_in_order(make: Callable[[int], VectorSim]) -> None:
    sim = make(5)
    sim.reset(10)
    for _ in range(3):
        sim.step(ACTIONS)
    assert sim.episode_seed.tolist() == [15, 11, 12, 13, 14]
    assert sim.episode_step.tolist() == [0, 3, 3, 3, 3]
    sim.step(ACTIONS)
    assert sim.episode_seed.tolist() == [15, 16, 17, 18, 19]
    assert sim.episode_step.tolist() == [1, 0, 0, 0, 0]


def test_inactive_rows_do_not_change(make: Callable[[int], VectorSim]) -> None:
    sim = make(5)
    sim.reset(0)
    sim.step(ACTIONS)
    active = torch.tensor([True, False, True, False, False])
    step = sim.step(ACTIONS, active)
    torch.testing.assert_close(step.reward, torch.tensor([3.0, 0.0, 1.8, 0.0, 0.0]))
    torch.testing.assert_close(step.obs["state"][1], torch.tensor([0.5, 0.5, 1.0]))
    torch.testing.assert_close(step.final_obs["state"][1], torch.tensor([0.5, 0.5, 1.0]))
    assert sim.episode_step.tolist() == [2, 1, 2, 1, 1]
    idle = sim.step(ACTIONS, torch.zeros(5, dtype=torch.bool))
    assert not idle.done.any()
    assert sim.episode_step.tolist() == [2, 1, 2, 1, 1]
    step = sim.step(ACTIONS)
    torch.testing.assert_close(step.reward[:3], torch.tensor([6.0, 1.5, 3.6]))


def test_chunks_end_with_the_episode_and_discount_executed_steps(make: Callable[[int], VectorSim]) -> None:
    sim = ChunkedSim(make(5), action_horizon=4, obs_horizon=2, gamma=0.5)
    sim.reset(0)
    step = sim.step(ACTIONS[:, None].expand(-1, 4, -1))
    assert step.steps.tolist() == [3, 4, 4, 4, 4]
    returns = [1 + 3 / 2 + 6 / 4, 0.5 + 1.5 / 2 + 3 / 4 + 5 / 8, 0.6 + 1.8 / 2 + 3.6 / 4 + 6 / 8]
    torch.testing.assert_close(step.reward[:3], torch.tensor(returns))
    torch.testing.assert_close(step.final_obs["state"][0, :, 0], torch.tensor([3.0, 6.0]))
    torch.testing.assert_close(step.obs["state"][0], torch.zeros(2, 3))


def test_actions_are_clipped_and_invalid_ones_refused(make: Callable[[int], VectorSim]) -> None:
    from robopolicy.errors import UserError

    sim = make(2)
    with pytest.raises(UserError, match="reset"):
        sim.step(torch.zeros(2, 1))
    sim.reset(0)
    assert sim.step(torch.tensor([[7.0], [-7.0]])).reward.tolist() == [1.0, -1.0]
    with pytest.raises(UserError, match="shape"):
        sim.step(torch.zeros(2, 3))
    with pytest.raises(UserError, match="NaN"):
        sim.step(torch.full((2, 1), torch.nan))
    with pytest.raises(UserError, match="one per environment"):
        sim.reset([1, 2, 3])
