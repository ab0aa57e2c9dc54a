"""Tests of the ant and the humanoid on MuJoCo Warp, on the CPU: forces, inertias and body poses of the device."""

import mujoco
import pytest
import torch

from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.registry import SimOptions, make_sim

pytest.importorskip("mujoco_warp")
pytestmark = [pytest.mark.compiles, pytest.mark.slow]


@pytest.mark.parametrize(("name", "steps", "atol"), [("ant", 2, 1e-5), ("humanoid", 12, 0.02)])
def test_robots_with_forces_agree_with_the_native_backend(name: str, steps: int, atol: float) -> None:
    """Before the first contact, the ant differs by at most 3e-6; the humanoid by 6e-5, its forces by 0.012 (measured).

    The humanoid has Newton's solver in both, as MuJoCo Warp has no PGS. From its first contact on, the ant differs:
    MuJoCo aligns the friction pyramid of a capsule with its axis, and MuJoCo Warp does not.
    """
    native, on_warp = (make_sim(name, SimOptions(6, backend=backend, threads=1)) for backend in ("mujoco", "warp"))
    assert isinstance(native, MujocoSim)
    native.task.model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
    torch.testing.assert_close(on_warp.reset(3), native.reset(3), rtol=0, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    low, high = native.spec.action_low, native.spec.action_high
    for _ in range(steps):
        action = low + (high - low) * torch.rand(6, len(low), generator=generator)
        found, expected = on_warp.step(action), native.step(action)
        torch.testing.assert_close(found.final_obs, expected.final_obs, rtol=0, atol=atol)
        torch.testing.assert_close(found.reward, expected.reward, rtol=0, atol=1e-4)
        assert torch.equal(found.done, expected.done)


def test_contact_forces_of_the_ant_are_observed_on_warp() -> None:
    sim = make_sim("ant", SimOptions(4, backend="warp"))
    sim.reset(0)
    forces = torch.zeros(4, 78)
    for _ in range(20):
        step = sim.step(torch.zeros(4, 8))
        forces = torch.maximum(forces, step.final_obs["state"][:, 27:].abs())
    assert (forces.amax(1) == 1).all()  # the feet reached the ground, and forces are clipped
    assert (step.info["reward.contact"] < 0).all()
