"""What recipes read beside their attempts: other attempts at the same tasks, and other probabilities."""

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from robopolicy.core.decisions import Decisions
from robopolicy.core.recipe import DEFAULTS
from robopolicy.recipe_files import read_recipe
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.annotators import Greedy, Worlds, asides_of
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.sim import TextSim
from robopolicy.text.task import Question, TextTask
from robopolicy.text.text_env import TextWorld, score
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import Calculator
from robopolicy_tasks.text.grid import Grid, Waypoints

READERS = {"remax": ["greedy"], "single_stream": ["half_life"]}  # recipe -> what is found for it beside its attempts
MORE = ("gigpo", "optimal_token_baseline")  # recipes that read what the world or the model shows


class Scale(TextTask):
    """The reward is the number of bytes of the answer; the solution is `ab`."""

    name = "text/scale"
    prompt_bytes, completion_bytes = 8, 4

    def episode(self, seed):
        return Question(str(seed), lambda completion: float(len(completion)), "ab")


def learner(task, recipe, **settings):
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=160), PolicySpec({"text": (16,)}, 6))
    config = TextRecipeConfig(**{"prompts": 3, "problems": 6, "recipe": recipe, "lr": 1e-2, **settings})
    algorithm = TextRecipe(config, policy, total_updates=8)
    return algorithm, TextRolloutSource(TextSim(task, SimOptions(num_envs=1)), algorithm, seed=0)


def played(task, recipe):
    """An algorithm with its source, worlds of its own, and a batch."""
    algorithm, feed = learner(task, recipe, group_size=2)
    rows = feed.next(algorithm)
    generator = torch.Generator().manual_seed(3)
    start = algorithm.reference_policy or algorithm.policy
    return algorithm, feed, Worlds(*(TextWorld(policy, task, generator) for policy in (algorithm.policy, start))), rows


@pytest.mark.parametrize("recipe", READERS)
def test_recipes_say_what_they_read_beside(recipe):
    algorithm, _ = learner(Arithmetic(), recipe, group_size=2)
    assert list(algorithm.asides()) == READERS[recipe]
    assert not asides_of({**DEFAULTS, **read_recipe("ppo")})  # its critic knows the value


@pytest.mark.parametrize("recipe", [*READERS, *MORE])
def test_recipes_that_read_more_than_their_attempts_run(recipe):
    algorithm, feed = learner(Arithmetic(), recipe, prompts=2)
    for _ in range(2):
        metrics = algorithm.update(feed.next(algorithm))
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    feed.close()


@pytest.mark.parametrize("task", [Grid(), Calculator(), Waypoints()], ids=lambda task: task.name)
@pytest.mark.parametrize("recipe", ["gigpo"])
def test_conversations_have_moments(recipe, task):
    algorithm, feed = learner(task, recipe, prompts=2, group_size=2)
    algorithm.update(feed.next(algorithm))
    feed.close()


def test_the_greedy_reward_is_that_of_the_likeliest_answer():
    algorithm, _feed, worlds, rows = played(Scale(), "remax")
    prompts = [algorithm.policy.tokenizer.prompt([str(key)]) for key in rows.group.tolist()]
    likeliest = algorithm.policy.write(prompts, deterministic=True).completions()
    assert rows.extra["greedy"].tolist() == [len(algorithm.policy.read(row)) for row in likeliest]
    assert not worlds.own.deterministic


def test_the_likeliest_answers_are_asked_for_anew_in_every_batch():
    aside, answers = Greedy(), iter([[0.0], [1.0]])
    aside.ask = lambda worlds, tasks: next(answers)
    attempts, rows = [SimpleNamespace(task=Task(0))], Decisions(torch.zeros(1, 1))
    assert [aside(None, attempts, rows).extra["greedy"].tolist() for _ in range(2)] == [[0.0], [1.0]]


def test_drift_is_the_change_on_the_last_attempt():
    algorithm, feed, worlds, rows = played(Scale(), "single_stream")
    assert rows.extra["drift"].eq(0).all()
    attempts = list(feed._batch.attempts)
    aside = feed.asides["half_life"]
    assert aside(worlds, attempts, rows).extra["drift"].max() < 1e-5  # the same weights
    with torch.no_grad():
        for parameter in algorithm.policy.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    last = {attempt.task.key: row for row, attempt in enumerate(attempts)}
    change = (score(algorithm.policy, rows).logp - rows.logp_old).detach().abs().sum(1) / rows.valid().sum(1)
    expected = torch.stack([change[last[attempt.task.key]] for attempt in attempts])
    torch.testing.assert_close(aside(worlds, attempts, rows).extra["drift"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["remax", "single_stream"])
def test_a_source_with_asides_resumes_exactly(recipe):
    algorithm, feed = learner(Scale(), recipe)
    for _ in range(2):
        algorithm.update(feed.next(algorithm))
    state, weights = copy.deepcopy((feed.state_dict(), algorithm.state_dict()))
    expected = [algorithm.update(feed.next(algorithm)) for _ in range(2)]
    other, again = learner(Scale(), recipe)
    other.load_state_dict(weights)
    assert again.load_state_dict(state)
    assert [other.update(again.next(other)) for _ in range(2)] == expected


def test_tokens_of_asides_count_and_their_attempts_are_not_reported():
    counts = {}
    for recipe in ("reinforce", "remax"):
        algorithm, feed = learner(Scale(), recipe, group_size=1)
        feed.next(algorithm)
        counts[recipe] = feed.generated
        assert len(feed.world.played) == 0
    assert counts["remax"] > counts["reinforce"]


def test_worlds_of_asides_leave_no_threads():
    algorithm, feed = learner(Scale(), "remax", group_size=1)
    feed.next(algorithm)
    time.sleep(0.1)
    before = threading.active_count()
    for _ in range(4):
        feed.next(algorithm)
    time.sleep(0.1)
    assert threading.active_count() <= before
    feed.close()
