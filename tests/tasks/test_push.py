"""Tests of the toy pushing task: contract, expert, contact model, camera image."""

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor, RandomActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy_tasks.toy.push import BLOCK, COLOURS, GRIPPER, push, render_tables


@pytest.mark.parametrize("cameras", [(), ("top",)])
def test_push_satisfies_the_simulator_contract(cameras):
    def make(num_envs: int):
        return make_sim("toy/push", SimOptions(num_envs=num_envs, cameras=cameras, image_size=16))

    assert check_simulator(make(3), make) == []


def test_the_expert_succeeds_and_random_actions_do_not():
    sim = make_sim("toy/push", SimOptions(num_envs=32))
    expert = evaluate(ExpertActor(get_task("push").require_expert()()), sim, episodes=64)
    random = evaluate(RandomActor(), sim, episodes=64)
    assert expert.success is not None and random.success is not None
    assert expert.success.mean() > 0.95 and random.success.mean() < 0.1


def test_touched_block_moves_along_the_line_of_centres():
    gripper, block = torch.tensor([[0.4, 0.0]]), torch.tensor([[0.4 + GRIPPER + BLOCK, 0.0]])
    moved, pushed = push(gripper, block, torch.tensor([[0.5, 0.0]]))
    assert moved[0].tolist() == pytest.approx([0.45, 0.0])
    assert pushed[0].tolist() == pytest.approx([0.45 + GRIPPER + BLOCK, 0.0])
    assert torch.equal(push(gripper, block, torch.tensor([[-0.5, 0.0]]))[1], block)


def test_camera_renders_each_object_at_its_position():
    picture = render_tables(torch.tensor([[0.25, 0.25]]), torch.tensor([[0.5, -0.25]]), 64, 64)[0]
    assert tuple(picture[:, 16, 16].tolist()) == COLOURS["gripper"]
    assert tuple(picture[:, 48, 32].tolist()) == COLOURS["block"]
    assert tuple(picture[:, 32, 48].tolist()) == COLOURS["mark"]
    assert tuple(picture[:, 2, 60].tolist()) == COLOURS["table"]


def test_other_cameras_are_refused():
    with pytest.raises(UserError, match="has only the camera 'top'"):
        make_sim("toy/push", SimOptions(cameras=("front",)))
