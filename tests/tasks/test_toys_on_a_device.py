"""Tests of the toy tasks on the simulated device: the CPU's episodes, with one wait per step."""

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim

simulated = pytest.importorskip("simulated", exc_type=ImportError)

TASKS = {"toy/point_mass": 38, "toy/push": 160}  # launches of a step in which all episodes end


def opened(task: str, num_envs: int, device: str = simulated.NAME) -> VectorSim:
    cameras = ("top",) if task == "toy/push" else ()
    return make_sim(task, SimOptions(num_envs, device=device, cameras=cameras, image_size=16, reward="shaped"))


@pytest.mark.parametrize("task", TASKS)
def test_episodes_on_a_device_are_those_of_the_cpu(task: str) -> None:
    sim, reference = opened(task, 5), opened(task, 5, "cpu")
    obs, expected = sim.reset(7), reference.reset(7)
    generator = torch.Generator().manual_seed(0)
    for k in range(50):
        assert {value.device.type for value in obs.values()} == {simulated.NAME}
        for key, value in expected.items():
            torch.testing.assert_close(obs[key].cpu(), value)
        action = torch.rand(5, sim.spec.action_dim, generator=generator) * 4 - 2
        active = None if k % 3 else torch.tensor([True, False, True, True, True])
        step = sim.step(action.to(simulated.DEVICE), None if active is None else active.to(simulated.DEVICE))
        wanted = reference.step(action, active)
        torch.testing.assert_close(step.reward.cpu(), wanted.reward)
        assert torch.equal(step.done.cpu(), wanted.done)
        assert torch.equal(sim.episode_seed.cpu(), reference.episode_seed)
        obs, expected = step.obs, wanted.obs
    assert reference.episode_seed.max() > 11  # some episodes ended


@pytest.mark.parametrize("task", TASKS)
def test_a_step_on_a_device_waits_once(task: str) -> None:
    sim = opened(task, 4)
    sim.reset(0)
    action = torch.zeros(4, sim.spec.action_dim, device=simulated.DEVICE)
    while sim.episode_step[0] < sim.spec.max_episode_steps - 1:
        sim.step(action)
    with simulated.record() as found:
        step = sim.step(action)
    assert step.truncated.all()
    assert found.waits == 1, found.places()
    assert found.launches <= TASKS[task], found.places()


@pytest.mark.parametrize("task", TASKS)
def test_toys_on_a_device_satisfy_the_simulator_contract(task: str) -> None:
    assert check_simulator(opened(task, 3), lambda num_envs: opened(task, num_envs)) == []


@pytest.mark.parametrize("task", TASKS)
def test_states_move_between_devices(task: str) -> None:
    sim, reference = opened(task, 2), opened(task, 2, "cpu")
    sim.reset(3)
    sim.step(torch.ones(2, sim.spec.action_dim, device=simulated.DEVICE))
    for key, value in reference.load_state_dict(sim.state_dict()).items():
        torch.testing.assert_close(sim.load_state_dict(reference.state_dict())[key].cpu(), value)


def test_actions_that_are_not_finite_are_refused_on_a_device() -> None:
    sim = opened("toy/point_mass", 2)
    sim.reset(0)
    with pytest.raises(UserError, match="the policy has diverged"):
        sim.step(torch.tensor([[0.0, 0.0], [0.0, torch.inf]], device=simulated.DEVICE))
