"""Tests of annotators: additional rollouts of the same tasks, and additional probabilities."""

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from annotated_runs import Scale, completed, learner

from robopolicy.core.decisions import Decisions
from robopolicy.core.recipe import DEFAULTS
from robopolicy.recipe_files import read_recipe
from robopolicy.text.annotators import GreedyReward, requested_annotators
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.text_env import score
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import Calculator
from robopolicy_tasks.text.grid import Grid, Waypoints

READERS = {"remax": ["greedy"], "single_stream": ["half_life"]}  # recipe -> its annotators
MORE = ("gigpo", "optimal_token_baseline")  # recipes that read outputs of the environment or the model


@pytest.mark.parametrize("recipe", READERS)
def test_recipes_list_their_annotators(recipe):
    algorithm, _ = learner(Arithmetic(), recipe, group_size=2)
    assert list(algorithm.annotators()) == READERS[recipe]
    assert not requested_annotators({**DEFAULTS, **read_recipe("ppo")})  # its critic estimates the value


@pytest.mark.parametrize("recipe", [*READERS, *MORE])
def test_recipes_with_additional_inputs_run(recipe):
    algorithm, feed = learner(Arithmetic(), recipe, prompts_per_update=2)
    for _ in range(2):
        metrics = algorithm.update(feed.next(algorithm))
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    feed.close()


@pytest.mark.parametrize("task", [Grid(), Calculator(), Waypoints()], ids=lambda task: task.name)
@pytest.mark.parametrize("recipe", ["gigpo"])
def test_gigpo_runs_on_conversations(recipe, task):
    algorithm, feed = learner(task, recipe, prompts_per_update=2, group_size=2)
    algorithm.update(feed.next(algorithm))
    feed.close()


def test_greedy_reward_is_the_reward_of_the_greedy_answer():
    algorithm, _feed, envs, rows = completed(Scale(), "remax")
    prompts = [algorithm.policy.tokenizer.prompt([str(key)]) for key in rows.group.tolist()]
    likeliest = algorithm.policy.generate(prompts, deterministic=True).completions()
    assert rows.extra["greedy"].tolist() == [len(algorithm.policy.decode_message(row)) for row in likeliest]
    assert not envs.current.deterministic


def test_greedy_answers_are_generated_for_every_batch():
    annotator, answers = GreedyReward(), iter([[0.0], [1.0]])
    annotator.compute = lambda envs, tasks: next(answers)
    trajectories, rows = [SimpleNamespace(task=Task(0))], Decisions(torch.zeros(1, 1))
    assert [annotator(None, trajectories, rows).extra["greedy"].tolist() for _ in range(2)] == [[0.0], [1.0]]


def test_drift_is_the_logp_change_on_the_last_rollout():
    algorithm, feed, envs, rows = completed(Scale(), "single_stream")
    assert rows.extra["drift"].eq(0).all()
    trajectories = list(feed._batch.trajectories)
    annotator = feed.annotators["half_life"]
    assert annotator(envs, trajectories, rows).extra["drift"].max() < 1e-5  # the same weights
    with torch.no_grad():
        for parameter in algorithm.policy.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    last = {trajectory.task.key: row for row, trajectory in enumerate(trajectories)}
    change = (score(algorithm.policy, rows).logp - rows.logp_old).detach().abs().sum(1) / rows.valid().sum(1)
    expected = torch.stack([change[last[trajectory.task.key]] for trajectory in trajectories])
    torch.testing.assert_close(annotator(envs, trajectories, rows).extra["drift"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["remax", "single_stream"])
def test_a_source_with_annotators_resumes_exactly(recipe):
    algorithm, feed = learner(Scale(), recipe)
    for _ in range(2):
        algorithm.update(feed.next(algorithm))
    state, weights = copy.deepcopy((feed.state_dict(), algorithm.state_dict()))
    expected = [algorithm.update(feed.next(algorithm)) for _ in range(2)]
    other, again = learner(Scale(), recipe)
    other.load_state_dict(weights)
    assert again.load_state_dict(state)
    assert [other.update(again.next(other)) for _ in range(2)] == expected


def test_tokens_of_annotators_count_and_their_rollouts_are_not_reported():
    counts = {}
    for recipe in ("reinforce", "remax"):
        algorithm, feed = learner(Scale(), recipe, group_size=1)
        feed.next(algorithm)
        counts[recipe] = feed.generated
        assert len(feed.env.completed) == 0
    assert counts["remax"] > counts["reinforce"]


def test_envs_of_annotators_leave_no_threads():
    algorithm, feed = learner(Scale(), "remax", group_size=1)
    feed.next(algorithm)
    time.sleep(0.1)
    before = threading.active_count()
    for _ in range(4):
        feed.next(algorithm)
    time.sleep(0.1)
    assert threading.active_count() <= before
    feed.close()
