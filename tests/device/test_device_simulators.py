"""Launches and waits of control steps on the simulated device, where they equal the steps on the CPU.

The kernels of MuJoCo Warp run on the CPU and are not counted; the launch of their recording is none of torch.
"""

from collections.abc import Iterator

import pytest
import torch

from robopolicy.sim.registry import SimOptions, make_sim

simulated = pytest.importorskip("simulated", exc_type=ImportError)
pytest.importorskip("mujoco_warp")
pytestmark = [pytest.mark.compiles, pytest.mark.filterwarnings("ignore:MULTICCD")]

NUM_ENVS = 6
# Mean launches of a step of all rows, and of a step of some rows; a step that prepares starts has more.
BUDGETS = {"half_cheetah": (40, 50), "inverted_pendulum": (38, 48), "lift": (96, 106), "go1_randomized": (150, 160)}


@pytest.fixture(autouse=True)
def device() -> Iterator[str]:
    from warp_on_device import use_simulated_memory

    with pytest.MonkeyPatch.context() as patch:
        use_simulated_memory(patch)
        yield simulated.NAME


@pytest.mark.parametrize("task", BUDGETS)
def test_a_step_keeps_its_budget_and_equals_the_cpu(task: str, device: str) -> None:
    sim, reference = (make_sim(task, SimOptions(NUM_ENVS, backend="warp", device=name)) for name in (device, "cpu"))
    torch.testing.assert_close(sim.reset(3)["state"].cpu(), reference.reset(3)["state"], rtol=0, atol=0)
    generator = torch.Generator().manual_seed(0)
    some = torch.arange(NUM_ENVS) % 2 == 0
    ended, launches = 0, ([], [])
    for k in range(62):
        action = torch.rand(NUM_ENVS, sim.spec.action_dim, generator=generator) * 2 - 1
        on_device = action.to(simulated.DEVICE)
        active, rows = (None, None) if k % 5 else (some, some.to(simulated.DEVICE))
        with simulated.record() as found:
            step = sim.step(on_device, rows)
        expected = reference.step(action, active)
        if k > 5:  # everything is compiled and uploaded
            launches[active is not None].append(found.launches)
            assert found.waits == 1, found.places()
        assert torch.equal(step.obs["state"].cpu(), expected.obs["state"])
        assert torch.equal(step.final_obs["state"].cpu(), expected.final_obs["state"])
        assert torch.equal(step.reward.cpu(), expected.reward)
        assert torch.equal(sim.episode_seed.cpu(), reference.episode_seed)
        ended += int(expected.done.sum())
    assert ended or task not in ("lift", "inverted_pendulum")
    for measured, budget in zip(launches, BUDGETS[task], strict=True):
        assert 0.8 * budget <= sum(measured) / len(measured) <= budget, measured
