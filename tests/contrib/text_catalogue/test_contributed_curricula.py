"""Tests of curricula: uniform limits, behaviour away from the limits, and resumption."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.curricula import (
    CategoryBandit,
    Frontier,
    Instructions,
    MeanTracker,
    MixtureSampler,
    Regret,
    StageCurriculum,
)
from robopolicy.errors import UserError
from robopolicy.text.rollouts.prompt_samplers import SAMPLERS, UncertaintySampler, Uniform
from robopolicy.text.rollouts.protocols import PromptPool, Task

COUNT = 12


POOL = PromptPool(
    [Task(100 + i, budget=4) for i in range(COUNT)],
    category=torch.arange(COUNT) % 3,
    difficulty=torch.arange(COUNT).flip(0).double(),
)


SETTINGS = {"mixture": {"shares": [0.5, 0.25, 0.25]}, "instructions": {"instructions": ["a", "b"]}}

CONTRIBUTED = sorted(set(SAMPLERS) - set(SAMPLERS.product()))


def started(sampler, pool: PromptPool = POOL, seed: int = 3):
    sampler.setup(pool, seed)
    return sampler


def keys(tasks) -> list[int]:
    return [task.key for task in tasks]


def outcome(sampler, tasks, reward, advantage) -> None:
    """Report one rollout per task to a sampler."""
    values = [torch.tensor([f(task) for task in tasks], dtype=torch.float64) for f in (reward, advantage)]
    sampler.observe(torch.tensor(keys(tasks)), *values)


@pytest.mark.parametrize("name", CONTRIBUTED)
def test_proposals_have_unique_keys_and_resume(name):
    sampler = started(SAMPLERS[name](**SETTINGS.get(name, {})))
    for _ in range(5):
        tasks = sampler.propose(4)
        assert len(set(keys(tasks))) == 4
        outcome(sampler, tasks, lambda task: float(task.key % 2), lambda task: 0.1 * (task.key % 3))
    state = sampler.state_dict()
    ahead = [sampler.propose(4) for _ in range(3)]
    again = started(SAMPLERS[name](**SETTINGS.get(name, {})), seed=9)
    again.load_state_dict(state)
    assert [again.propose(4) for _ in range(3)] == ahead


def test_shares_must_cover_all_categories():
    with pytest.raises(UserError, match="3 categories, but there are shares of 2"):
        started(MixtureSampler([0.8, 0.2]))


def test_infinite_temperature_samples_categories_uniformly():
    """Limit of SEC (Chen et al. 2025): the bandit samples all categories uniformly, independent of their values."""
    sampler = started(CategoryBandit(temperature=float("inf"), rate=1.0))
    outcome(sampler, POOL.tasks, lambda task: 0.0, lambda task: float(task.key % 3))
    count = torch.zeros(3)
    for _ in range(600):
        count[(sampler.propose(1)[0].key - 100) % 3] += 1
    assert (count / 600 - 1 / 3).abs().max() < 0.06  # 3 standard deviations


def test_category_values_without_advantage_decay_to_zero():
    """Limit of SEC: the value decays to 0 without advantage; the category with advantage is sampled most often."""
    sampler = started(CategoryBandit(temperature=0.1, rate=0.5))
    sampler.value += 1.0
    for _ in range(20):
        outcome(sampler, POOL.tasks, lambda task: float(task.key % 3), lambda task: float((task.key - 100) % 3 == 2))
    torch.testing.assert_close(sampler.value, torch.tensor([0.0, 0.0, 1.0]).double(), atol=1e-5, rtol=0)
    assert sum((key - 100) % 3 == 2 for key in keys(sampler.propose(4))) >= 3


def test_category_probability_is_independent_of_category_size():
    """SEC (Chen et al. 2025): Q is a moving average of the mean |advantage| with rate 0.1."""
    sampler = started(CategoryBandit(), PromptPool(POOL.tasks, category=(torch.arange(COUNT) > 8).long()))
    sampled = torch.tensor([sampler.propose(1)[0].key > 108 for _ in range(600)])
    assert abs(float(sampled.double().mean()) - 0.5) < 0.06  # 3 standard deviations
    outcome(sampler, POOL.tasks[:2], lambda task: 0.0, lambda task: 1.0 if task.key == 100 else -1.0)
    assert sampler.value.tolist() == [0.1, 0.0]


def test_one_candidate_per_task_equals_the_uniform_sampler():
    """Limit of PCL (Gao et al. 2025): k = 1."""
    plain, frontier = started(Uniform()), started(Frontier(factor=1))
    for _ in range(4):
        outcome(frontier, POOL.tasks, lambda task: float(task.key % 2), lambda task: 0.0)
        assert frontier.propose(5) == plain.propose(5)


def test_frontier_proposes_half_solved_tasks():
    sampler = started(Frontier(factor=3))
    outcome(sampler, POOL.tasks, lambda task: 0.5 if task.key < 104 else 1.0, lambda task: 0.0)
    assert sorted(keys(sampler.propose(4))) == [100, 101, 102, 103]


def test_four_candidates_per_task_and_new_ones_count_as_half_solved():
    """PCL (Gao et al. 2025)."""
    sampler = started(Frontier())
    assert (sampler.factor, sampler.target) == (4, 0.5)
    outcome(sampler, POOL.tasks[3:], lambda task: 0.4, lambda task: 0.0)
    assert sorted(keys(sampler.propose(3))) == [100, 101, 102]  # all twelve are candidates


def test_one_stage_equals_the_uniform_sampler():
    """Limit of CRAFT-GUI (Nong et al. 2025)."""
    plain, staged = started(Uniform()), started(StageCurriculum(stages=1), PromptPool(POOL.tasks))
    assert [staged.propose(5) for _ in range(4)] == [plain.propose(5) for _ in range(4)]


def test_the_next_stage_opens_at_the_reward_threshold():
    sampler = started(StageCurriculum(stages=3, threshold=0.5, rate=1.0))
    assert min(keys(sampler.propose(4))) == 108  # the easiest third
    outcome(sampler, POOL.tasks, lambda task: 1.0, lambda task: 0.0)
    seen = {key for _ in range(20) for key in keys(sampler.propose(4))}
    assert seen == set(range(104, 112)) and sampler.mean == 0.0
    outcome(sampler, POOL.tasks, lambda task: 0.5, lambda task: 0.0)  # equal to the threshold
    assert sampler.stage == 3


def test_categories_with_zero_share_are_never_sampled():
    """Limit of Critique-Coder (Ruan et al. 2025): share 0."""
    sampler = started(MixtureSampler([1.0, 0.0, 0.0]))
    assert {(key - 100) % 3 for key in keys(sampler.propose(4))} == {0}
    mixed = started(MixtureSampler([0.5, 0.0, 0.5])).propose(4)
    assert sorted((key - 100) % 3 for key in keys(mixed)) == [0, 0, 2, 2]


def test_shares_are_rounded_by_the_largest_remainder():
    """The number of tasks is exact, and a category without a share has none."""
    pool = PromptPool(POOL.tasks, category=torch.arange(COUNT) % 4)
    for shares, n, counts in (
        ([0.1, 0.3, 0.3, 0.3], 5, [0, 2, 2, 1]),  # 0.5, 1.5, 1.5, 1.5
        ([0.0, 0.5, 0.5, 0.0], 3, [0, 2, 1, 0]),
        ([0.7, 0.3, 0.0, 0.0], 4, [3, 1, 0, 0]),
    ):
        tasks = started(MixtureSampler(shares), pool).propose(n)
        sampled = torch.bincount(torch.tensor([task.key % 4 for task in tasks]), minlength=4)
        assert sampled.tolist() == counts


@pytest.mark.parametrize("name", sorted({*CONTRIBUTED} - {"stage_curriculum", "mixture"}))
def test_a_batch_larger_than_the_pool_is_refused(name):
    sampler = started(SAMPLERS[name](**SETTINGS.get(name, {})))
    with pytest.raises(UserError, match="13 different tasks"):
        sampler.propose(13)


def test_tasks_with_zero_weight_complete_a_batch():
    """Solved tasks with a floor of 0, categories at a very low temperature."""
    uncertain, bandit = (
        started(UncertaintySampler(floor=0.0, tracker=MeanTracker())),
        started(CategoryBandit(temperature=1e-4)),
    )
    outcome(uncertain, POOL.tasks, lambda task: 0.5 if task.key < 102 else 1.0, lambda task: 0.0)
    bandit.value[1] = 1.0
    assert {100, 101} < set(keys(uncertain.propose(4)))
    assert {101, 104, 107, 110} < set(keys(bandit.propose(6)))


def test_rewards_of_tasks_outside_the_pool_are_ignored():
    """Restatements of a strategy have their own keys."""
    sampler = started(Regret())
    sampler.observe(torch.tensor([100, 999]), torch.tensor([1.0, 1.0]), torch.zeros(2))
    assert sampler.best[0] == 1.0 and not sampler.best[1:].isfinite().any()


def completed(sampler, tasks, rewards) -> None:
    """Report two rollouts per task with rewards `rewards(task)`."""
    twice = torch.tensor([key for key in keys(tasks) for _ in range(2)])
    values = torch.tensor([value for task in tasks for value in rewards(task)], dtype=torch.float64)
    sampler.observe(twice, values, torch.zeros(len(twice)))


def test_regret_is_the_best_rollout_minus_the_running_mean():
    sampler = started(Regret(replay=1.0, temperature=1.0, decay=0.5))
    first, second, third = POOL.tasks[:3]
    completed(sampler, [first], lambda task: (1.0, 0.0))  # regret 1 - 0.5
    completed(sampler, [second], lambda task: (1.0, 1.0))  # 1 - 1
    completed(sampler, [third], lambda task: (0.0, 0.0))  # no success yet: 0 - 0
    assert sampler.weight().tolist()[:4] == [1.0, 1 / 2, 1 / 2, 0.0]
    completed(sampler, [second], lambda task: (0.0, 0.0))  # the mean drops: 1 - (1 + 0) / 2, equal to the first
    assert sampler.weight().tolist()[:4] == [1.0, 1.0, 1 / 3, 0.0]


def test_regret_weights_decrease_steeply_with_rank():
    """The weight is rank^(-1 / 0.3); half of the tasks are replayed, and the mean decays by half."""
    sampler = started(Regret())
    for place, reward in enumerate((1.0, 0.5)):
        completed(sampler, [POOL.tasks[place]], lambda task: (reward, 0.0))  # noqa: B023
    assert sampler.replay == 0.5 and sampler.weight()[:2].tolist() == pytest.approx([1.0, 2 ** (-1 / 0.3)])
    completed(sampler, [POOL.tasks[0]], lambda task: (0.0, 0.0))
    assert float(sampler.tracker.read(torch.tensor([100]))) == 0.25


def test_equal_regrets_are_sampled_equally_and_larger_ones_more_often():
    count = torch.zeros(2, COUNT)
    for row, rewards in enumerate((lambda task: (0.5, 0.5), lambda task: (float(task.key == 104), 0.0))):
        sampler = started(Regret(replay=1.0, temperature=1.0))
        completed(sampler, POOL.tasks, rewards)
        for _ in range(1200):
            count[row, sampler.propose(1)[0].key - 100] += 1
    assert (count[0] / 1200 - 1 / COUNT).abs().max() < 0.03  # 4 standard deviations
    assert float(count[1, 4] / 1200) == pytest.approx(1 / (1 + 11 / 2), abs=0.05)  # rank 1 against eleven of rank 2


def test_regret_without_replay_samples_every_task_once():
    sampler, plain = started(Regret(replay=0.0)), started(Uniform())
    sampler._generator.set_state(plain._generator.get_state())
    completed(sampler, POOL.tasks, lambda task: (1.0, 0.0))
    assert sorted(keys(sampler.propose(6)) + keys(sampler.propose(6))) == list(range(100, 112))
    with pytest.raises(UserError, match="replay in"):
        Regret(replay=1.5)


def instruction_of(task: Task) -> str:
    """The instruction of a task."""
    assert task.context["kind"] == "instruction"
    return task.context["text"]


def test_one_instruction_samples_the_tasks_of_the_uniform_sampler():
    """Limit of INSPO (Zhou et al. 2025): the tasks equal the uniform sampler's, all with the one instruction."""
    plain, sampler = started(Uniform()), started(Instructions(["think"]))
    tasks = sampler.propose(5)
    assert keys(tasks) == keys(plain.propose(5)) and all(instruction_of(task) == "think" for task in tasks)


def test_rewarded_instructions_are_sampled_and_unrewarded_ones_dropped():
    sampler = started(Instructions(["good", "bad"], most=2, trial=1))
    for _ in range(10):
        tasks = sampler.propose(6)
        outcome(sampler, tasks, lambda task: float(instruction_of(task) == "good"), lambda task: 0.0)
    assert {instruction_of(task) for task in sampler.propose(6)} == {"good"}
    sampler.admit("new")
    assert set(sampler.population) == {"good", "new"}


def test_instructions_are_scored_after_their_trial():
    sampler = started(Instructions(["good", "bad"], most=2, trial=2))
    sampler.population = {"good": (1.5, 2), "bad": (0.0, 1)}
    sampler.admit("new")
    assert set(sampler.population) == {"bad", "new"}, "of the tried ones the worst, though it is the best"
    sampler._given = {100: "bad"}
    sampler.observe(torch.tensor([100, 100]), torch.tensor([1.0, 0.0]), torch.zeros(2))
    assert sampler.population["bad"] == (1.0, 3)


def test_missing_categories_are_refused():
    with pytest.raises(UserError, match="needs the category of every task"):
        started(CategoryBandit(), PromptPool(POOL.tasks))
