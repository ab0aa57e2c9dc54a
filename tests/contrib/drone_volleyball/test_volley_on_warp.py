"""Tests of the volleyball drills on MuJoCo Warp, on the CPU: agreement with the native backend."""

import pytest
import torch

from robopolicy.sim.registry import SimOptions, get_task, make_sim

pytest.importorskip("mujoco_warp")
pytestmark = [pytest.mark.compiles, pytest.mark.filterwarnings("ignore:MULTICCD")]


@pytest.mark.parametrize("name", ["volley/hit", pytest.param("volley/pass", marks=pytest.mark.slow)])
def test_drills_agree_with_the_native_backend_through_a_bump(name: str) -> None:
    """Single and double precision differ by at most 2e-5 before the first bump and by 3e-4 after it (measured)."""
    native, on_warp = (make_sim(name, SimOptions(4, backend=b, reward="shaped", threads=1)) for b in ("mujoco", "warp"))
    expert, bumps = get_task(name).require_expert()(), torch.zeros(4)
    obs = native.reset(0)
    torch.testing.assert_close(on_warp.reset(0), obs, rtol=0, atol=1e-6)
    for _ in range(50):
        action = expert(native, obs)
        expected, found = native.step(action), on_warp.step(action)
        obs, bumps = expected.obs, expected.info["bumps"]
        torch.testing.assert_close(found.final_obs, expected.final_obs, rtol=0, atol=2e-3 if bumps.any() else 5e-5)
        torch.testing.assert_close(found.reward, expected.reward, rtol=0, atol=1e-4)
        assert torch.equal(found.done, expected.done) and torch.equal(found.info["bumps"], bumps)
        assert not found.info["overflow"].any()
    assert bumps.min() == 1


@pytest.mark.slow
def test_the_juggler_keeps_the_ball_in_the_air_on_warp() -> None:
    sim, expert = make_sim("volley/bump", SimOptions(4, backend="warp")), get_task("volley/bump").require_expert()()
    obs = sim.reset(0)
    for _ in range(300):
        step = sim.step(expert(sim, obs))
        obs = step.obs
        assert not step.done.any()
    assert step.info["bumps"].min() >= 3
