"""Test of the planar arm on the simulated device."""

import pytest
import torch

from robopolicy.sim.registry import SimOptions, make_sim

simulated = pytest.importorskip("simulated", exc_type=ImportError)


def test_arms_on_a_device_follow_those_of_the_cpu_and_wait_once_per_step() -> None:
    sim, reference = (make_sim("toy/arm", SimOptions(4, device=device)) for device in (simulated.NAME, "cpu"))
    torch.testing.assert_close(sim.reset(5)["state"].cpu(), reference.reset(5)["state"])
    action = torch.linspace(-1, 1, 32).view(4, 8)
    on_device = action.to(simulated.DEVICE)
    for _ in range(30):
        with simulated.record() as found:
            step = sim.step(on_device)
        torch.testing.assert_close(step.obs["state"].cpu(), reference.step(action).obs["state"])
        assert found.waits == 1 and found.launches <= 30, found.places()
