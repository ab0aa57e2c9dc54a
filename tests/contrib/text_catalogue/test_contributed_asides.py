"""What recipes read beside their attempts: other attempts at the same tasks, and other probabilities."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from robopolicy.contrib.text_catalogue.annotators import (
    BETA,
    ROLLOUTS,
    SAMPLES,
    BestValue,
    SegmentValue,
    cut_points,
    segment_starts,
)
from robopolicy.core.decisions import Decisions
from robopolicy.core.gradients import flat_gradient
from robopolicy.core.recipe import DEFAULTS
from robopolicy.errors import UserError
from robopolicy.recipe_files import read_recipe
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.annotators import Worlds, asides_of
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import Episode, Question, TextTask, Turn
from robopolicy.text.text_env import TextWorld, score
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import Calculator
from robopolicy_tasks.text.grid import Grid, Waypoints

READERS = {  # recipe -> what is found for it beside its attempts
    "a_star_po": ["value_ref"],
    "a_lol": ["mean_ref"],
    "self": ["unlikely"],
    "segment_spo": ["segments"],
    "proact": ["rollout_weight"],
    "spae": ["potential_gain"],
    "duration_aware": ["duration"],
}


MORE = (  # recipes that read what the world or the model shows
    *(
        "v0",
        "hgpo",
        "a2fm",
        "capo",
        "polychromic",
        "clpo",
    ),
    *("copo", "sec", "gradient_weights", "hypervolume", "dialtree", "lspo"),
    *("progrpo", "salt", "r3"),
)


class Scale(TextTask):
    """The reward is the number of bytes of the answer; the solution is `ab`."""

    name = "text/scale"
    prompt_bytes, completion_bytes = 8, 4

    def episode(self, seed):
        return Question(str(seed), lambda completion: float(len(completion)), "ab")


class Errand(Episode):
    """Three turns, each worth 1."""

    prompt, turn = "go", 0

    def step(self, completion):
        self.turn += 1
        return Turn(1.0, success=True, done=self.turn == 3, reply="on")


class Errands(TextTask):
    name, prompt_bytes, completion_bytes, max_turns = "text/errands", 48, 4, 3

    def episode(self, seed):
        return Errand()


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


@pytest.mark.parametrize("recipe", [*READERS, *MORE])
def test_recipes_that_read_more_than_their_attempts_run(recipe):
    algorithm, feed = learner(Arithmetic(), recipe, prompts=2)
    for _ in range(2):
        metrics = algorithm.update(feed.next(algorithm))
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    feed.close()


@pytest.mark.parametrize("task", [Grid(), Calculator(), Waypoints()], ids=lambda task: task.name)
@pytest.mark.parametrize("recipe", ["segment_spo", "spae", "salt"])
def test_conversations_have_moments(recipe, task):
    algorithm, feed = learner(task, recipe, prompts=2, group_size=2)
    algorithm.update(feed.next(algorithm))
    feed.close()


def test_the_best_value_is_a_soft_maximum_over_eight_attempts():
    """A*-PO (Brantley et al. 2025): beta_1 is 0.5."""
    found = BestValue().value(torch.tensor([[1.0] + [0.0] * 7, [1.0] * 8]))
    torch.testing.assert_close(found, torch.tensor([0.5 * math.log((math.exp(2.0) + 7.0) / 8.0), 1.0]))


@pytest.mark.parametrize(("recipe", "key"), [("a_star_po", "value_ref"), ("a_lol", "mean_ref")])
def test_values_of_tasks_are_soft_or_mean_and_found_once(recipe, key):
    _algorithm, feed, worlds, rows = played(Scale(), recipe)
    aside = feed.asides[key]
    aside.known.clear()
    state = worlds.start.generator.get_state()
    value = aside(worlds, feed._batch.attempts, rows).extra[key]
    worlds.start.generator.set_state(state)
    tasks = list({attempt.task.key: attempt.task for attempt in feed._batch.attempts}.values())
    found = worlds.start.play([task for task in tasks for _ in range(SAMPLES)])
    first = [attempt.reward for attempt in found[:SAMPLES]]
    best = BETA * math.log(sum(math.exp(reward / BETA) for reward in first) / SAMPLES)
    by_hand = best if key == "value_ref" else sum(first) / SAMPLES
    assert float(value[0]) == pytest.approx(by_hand, rel=1e-5)
    before = worlds.start.generated
    assert torch.equal(aside(worlds, feed._batch.attempts, rows).extra[key], value)
    assert worlds.start.generated == before  # nothing was played again


@torch.no_grad()
def test_likelihood_is_that_of_the_start():
    algorithm, feed, worlds, rows = played(Scale(), "self")
    with torch.enable_grad():
        algorithm.update(rows.with_fields(extra={**rows.extra, "likelihood": torch.zeros(len(rows))}))
    feed.asides["unlikely"].known.clear()
    again = feed.asides["unlikely"](worlds, feed._batch.attempts, rows)
    torch.testing.assert_close(again.extra["likelihood"], rows.extra["likelihood"])
    policy = algorithm.reference_policy
    loss, _ = policy.sft_loss([policy.tokenizer.prompt([str(int(rows.group[0]))])], [policy.message("ab")])
    assert float(again.extra["likelihood"][0]) == pytest.approx(math.exp(-float(loss)), rel=1e-4)


def test_values_before_messages_come_from_there():
    _algorithm, feed, worlds, rows = played(Grid(), "proact")
    attempts = feed._batch.attempts
    moments, places = cut_points(worlds.own, attempts)
    assert len(moments) == 3 + sum(int(attempt.metrics["turns"]) - 1 for attempt in attempts)
    later = worlds.own.play([moments[places[0][1]]] * ROLLOUTS)
    assert all(attempt.record.said[0] == attempts[0].record.said[0] for attempt in later)
    unit, value = rows.require("unit"), rows.extra["rollout_value"]
    first = (unit == 0) & rows.valid()
    same = rows.require("group") == rows.require("group")[0]
    assert len(value[same][first[same]].unique()) == 1 and value.shape == rows.shape


def test_messages_are_cut_behind_every_fifth_uncertain_token():
    """Segments: sure tokens do not count, the next message counts anew, and nothing begins behind its end."""
    logp = torch.tensor([[-1.0] * 6 + [0.0] * 3 + [-1.0] * 4 + [0.0] * 2 + [-1.0] * 7])
    mask = torch.ones_like(logp).bool()
    mask[0, 13:15] = False  # the reply
    unit = torch.tensor([[0] * 15 + [1] * 7])
    rows = Decisions(logp, mask=mask, unit=unit)
    assert segment_starts(rows, 5, 0.9)[0].nonzero()[:, 0].tolist() == [0, 5, 15, 20]
    assert segment_starts(rows, 1, 0.9)[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, *range(15, 22)]
    assert segment_starts(rows, 99, 0.9)[0].nonzero()[:, 0].tolist() == [0, 15]


def test_values_at_cuts_come_from_there():
    """Segments: the message goes on where it was cut, and telescopes to the reward."""
    algorithm, feed, worlds, rows = played(Scale(), "segment_spo")
    feed.asides["segments"] = aside = SegmentValue(every=1, below=1.0)
    attempts = feed._batch.attempts
    cut = aside(worlds, attempts, worlds.own.batch(attempts))
    unit, own, value = cut.require("unit"), cut.valid(), cut.require("value")
    assert all(unit[row][own[row]].tolist() == list(range(int(own[row].sum()))) for row in range(len(cut)))
    row = int(own.sum(1).argmax())
    count = int(own[row].sum())
    assert count == 6 and rows.require("unit")[row].tolist() == [0] * 5 + [1]  # as the recipe cuts it
    columns = [[] for _ in attempts]
    columns[row] = [count - 1]
    moments, places = cut_points(worlds.own, attempts, columns)
    later = worlds.own.play([moments[places[row][1]]] * ROLLOUTS)
    said = attempts[row].decisions.extra["tokens"][0, int(cut.extra["start"][row]) :][: count - 1]
    for attempt in later:
        start = int(attempt.decisions.extra["start"])
        assert torch.equal(attempt.decisions.extra["tokens"][0, start:][: count - 1], said)
        assert attempt.reward == len(attempt.record.said[0])
    gain = algorithm.recipe.advantage(cut)[row][own[row]]
    assert float(gain.sum()) == pytest.approx(attempts[row].reward - float(value[row][own[row]][0]), abs=1e-5)
    assert float(gain[-1]) == pytest.approx(attempts[row].reward - float(value[row][count - 1]), abs=1e-5)


def test_values_of_rollouts_are_discounted_as_the_start_says():
    found = {}
    for gamma in (1.0, 0.9):
        start = {"name": "gae", "gamma": gamma, "level": "unit", "rollout_weight": 0.5}
        aside = asides_of({**DEFAULTS, **read_recipe("proact"), "advantage_source": start})["rollout_weight"]
        _algorithm, feed, worlds, rows = played(Errands(), "proact")
        found[gamma] = aside(worlds, feed._batch.attempts, rows).extra["rollout_value"]
    turn, own = rows.require("unit"), rows.valid()
    for gamma, value in found.items():
        expected = torch.tensor([1.0 + gamma + gamma**2, 1.0 + gamma, 1.0])
        torch.testing.assert_close(value[own], expected[turn[own]])


@torch.no_grad()
def test_probes_ask_for_the_answer_before_every_message():
    algorithm, feed, _worlds, rows = played(Calculator(), "spae")
    accuracy, sure = rows.extra["probe_accuracy"], rows.extra["probe_confidence"]
    attempt, policy = feed._batch.attempts[0], algorithm.policy
    answer = attempt.record.episode.answer
    loss, info = policy.sft_loss([policy.tokenizer.prompt([attempt.record.episode.prompt])], [policy.message(answer)])
    assert float(accuracy[0, 0]) == pytest.approx(math.exp(-float(loss)), rel=1e-4)
    assert float(sure[0, 0]) == pytest.approx(math.exp(-float(info["entropy"])), rel=1e-4)


def test_durations_are_tokens_of_messages():
    _algorithm, _feed, _worlds, rows = played(Grid(), "duration_aware")
    unit, duration = rows.require("unit")[0], rows.extra["duration"][0]
    for number in unit.unique().tolist():
        own = (unit == number) & rows.valid()[0]
        assert duration[own].unique().tolist() == [int(own.sum())]


@pytest.mark.parametrize("recipe", ["a_star_po", "proact"])
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


def test_what_players_elsewhere_said_cannot_be_gone_on_from():
    _algorithm, feed, worlds, _rows = played(Grid(), "segment_spo")
    with pytest.raises(UserError, match="needs players=0"):
        cut_points(worlds.own, [replace(feed._batch.attempts[0], record=None)])


def test_weights_of_objectives_follow_the_gradients_of_the_learner_and_resume():
    """Weights by gradients (Lu et al. 2025), against autograd of the loss that is written out."""
    algorithm, feed = learner(Scale(), "gradient_weights", group_size=4)
    weights = feed.collector.reward.parts[0]
    weights.followed = feed.collector.reward.followed = ("reward", "length", "cut")  # which differ without training
    rows = feed.next(algorithm)
    worth, group = rows.extra["objectives"], rows.require("group")
    assert worth.shape == (len(rows), 3)
    told = [attempt.metrics for attempt in feed._batch.attempts]
    assert worth[:, 1:].tolist() == [[metrics["length"], metrics["cut"]] for metrics in told]
    logp, valid = score(algorithm.policy, rows).logp, rows.valid()
    mean = (logp * valid).sum(1) / valid.sum(1).clamp(min=1)
    jacobian = []
    for values in worth.T:
        scores = torch.zeros_like(values)
        for key in group.unique():
            own = group == key
            scores[own] = (values[own] - values[own].mean()) / values[own].std(correction=0).clamp(min=1e-8)
        jacobian.append(flat_gradient((scores * mean).mean(), algorithm.policy.parameters()))
    jacobian = torch.stack(jacobian).detach()
    algorithm.update(rows)
    torch.testing.assert_close(algorithm.influence, jacobian @ jacobian.sum(0), rtol=1e-3, atol=1e-5)
    before = weights.weight.clone()
    state = copy.deepcopy(feed.state_dict())  # reports first
    expected = torch.softmax(before.log() + algorithm.influence.double(), 0)
    torch.testing.assert_close(weights.weight, expected)
    assert not torch.equal(weights.weight, before)
    other = learner(Scale(), "gradient_weights", group_size=4)[1]
    other.load_state_dict(state)
    assert torch.equal(other.collector.reward.parts[0].weight, weights.weight)


def test_the_last_batch_is_judged_once_more_by_what_became_of_the_reward():
    """PIPO: nothing while the reward is as before; with a gain, the rows of the last batch count again."""
    algorithm, feed = learner(Scale(), "pipo", group_size=4)
    stage = algorithm.recipe.pipeline.stages[-1]
    for _ in range(2):
        rows = feed.next(algorithm)
        algorithm.update(rows)
    again = rows.source == 1
    assert int(again.sum()) == len(rows) / 2 and bool((algorithm.advantage[again] == 0).all())
    stage.rewards = [0.0, 0.1] * 4  # everything is better than that
    rows = feed.next(algorithm)
    algorithm.update(rows)
    again = rows.source == 1
    assert bool((algorithm.advantage[again] != 0).any()) and float(algorithm.advantage[again].abs().max()) <= 10.0


def test_a_batch_that_moves_the_front_is_worth_more():
    """Weights by hypervolume (Lu et al. 2025)."""
    algorithm, feed = learner(Arithmetic(), "hypervolume")
    feed.next(algorithm)
    part = feed.collector.reward.parts[1]
    assert len(part.front) <= 1 and part.gain >= 0.0
    algorithm.update(feed.next(algorithm))
    assert feed.state_dict()["collector"]["reward"]["1"]["gain"] == part.gain
