"""Tests of prompt samplers: limits where a curriculum is uniform, behaviour away from them, and resumption."""

import pytest
import torch

from robopolicy.core.registry import build
from robopolicy.errors import UserError
from robopolicy.recipe_files import read_recipe
from robopolicy.text.rollouts.prompt_samplers import SAMPLERS, UncertaintySampler, Uniform
from robopolicy.text.rollouts.protocols import PromptPool, Task

COUNT = 12
POOL = PromptPool(
    [Task(100 + i, budget=4) for i in range(COUNT)],
    category=torch.arange(COUNT) % 3,
    difficulty=torch.arange(COUNT).flip(0).double(),
)


def started(sampler, pool: PromptPool = POOL, seed: int = 3):
    sampler.setup(pool, seed)
    return sampler


def keys(tasks) -> list[int]:
    return [task.key for task in tasks]


def outcome(sampler, tasks, reward, advantage) -> None:
    """Report one rollout per task to a sampler."""
    values = [torch.tensor([f(task) for task in tasks], dtype=torch.float64) for f in (reward, advantage)]
    sampler.observe(torch.tensor(keys(tasks)), *values)


@pytest.mark.parametrize("name", SAMPLERS.product())
def test_proposals_have_unique_keys_and_resume(name):
    sampler = started(SAMPLERS[name]())
    for _ in range(5):
        tasks = sampler.propose(4)
        assert len(set(keys(tasks))) == 4
        outcome(sampler, tasks, lambda task: float(task.key % 2), lambda task: 0.1 * (task.key % 3))
    state = sampler.state_dict()
    ahead = [sampler.propose(4) for _ in range(3)]
    again = started(SAMPLERS[name](), seed=9)
    again.load_state_dict(state)
    assert [again.propose(4) for _ in range(3)] == ahead


def test_uniform_proposes_every_task_once_per_epoch():
    sampler = started(Uniform())
    assert sorted(keys(sampler.propose(5)) + keys(sampler.propose(5)) + keys(sampler.propose(2))) == list(
        range(100, 112)
    )
    with pytest.raises(UserError, match="13 different tasks"):
        sampler.propose(13)


def test_uncertain_tasks_are_proposed_more_often():
    sampler = started(UncertaintySampler(floor=0.0))
    for _ in range(50):
        outcome(sampler, POOL.tasks, lambda task: 0.5 if task.key < 103 else 1.0, lambda task: 0.0)
    rates = sampler.rates()
    torch.testing.assert_close(rates[:3], torch.full((3,), 0.5).double())
    weight = (rates * (1 - rates)).sqrt()
    share = torch.bincount(torch.tensor([sampler.propose(1)[0].key - 100 for _ in range(600)]), minlength=COUNT) / 600
    assert (share - weight / weight.sum()).abs().max() < 0.06


def test_single_stream_samples_prompts_by_the_standard_deviation_of_outcomes():
    sampler = started(build("sampler", read_recipe("single_stream")["rollout"]["sampler"]))
    outcome(sampler, POOL.tasks, lambda task: float(task.key < 102), lambda task: 0.0)
    rates = torch.tensor([0.96 * 4 + 1, 0.96 * 4]).double() / (0.96 * 8 + 1)
    torch.testing.assert_close(sampler.rates(), rates[[0] * 2 + [1] * (COUNT - 2)])
    for turn in range(99):
        outcome(sampler, POOL.tasks, lambda task, turn=turn: float(task.key < 102 or turn % 2), lambda task: 0.0)
    rates = sampler.rates()
    weight = (rates * (1 - rates)).sqrt() + 0.05
    share = torch.bincount(torch.tensor([sampler.propose(1)[0].key - 100 for _ in range(600)]), minlength=COUNT) / 600
    assert weight[0] < 0.15 and weight[-1] > 0.5
    assert (share - weight / weight.sum()).abs().max() < 0.06


@pytest.mark.parametrize("name", SAMPLERS.product())
def test_a_batch_larger_than_the_pool_is_refused(name):
    sampler = started(SAMPLERS[name]())
    with pytest.raises(UserError, match="13 different tasks"):
        sampler.propose(13)
