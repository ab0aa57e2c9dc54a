"""Tests of annotators: additional rollouts of the same tasks, and additional probabilities."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from annotated_runs import Scale, completed, learner

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
from robopolicy.text.annotators import requested_annotators
from robopolicy.text.task import TextEpisode, TextTask, Turn
from robopolicy.text.text_env import score
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import Calculator
from robopolicy_tasks.text.grid import Grid, Waypoints

READERS = {  # recipe -> annotations in addition to its rollouts
    "a_star_po": ["value_ref"],
    "a_lol": ["mean_ref"],
    "self": ["unlikely"],
    "segment_spo": ["segments"],
    "proact": ["rollout_weight"],
    "spae": ["potential_gain"],
    "duration_aware": ["duration"],
}


MORE = (  # recipes that read data of the environment or the model
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


class Errand(TextEpisode):
    """Episode of three turns with reward 1 each."""

    prompt, turn = "go", 0

    def step(self, completion):
        self.turn += 1
        return Turn(1.0, success=True, done=self.turn == 3, reply="on")


class Errands(TextTask):
    name, prompt_bytes, completion_bytes, max_turns = "text/errands", 48, 4, 3

    def episode(self, seed):
        return Errand()


@pytest.mark.parametrize("recipe", READERS)
def test_recipes_declare_their_annotators(recipe):
    algorithm, _ = learner(Arithmetic(), recipe, group_size=2)
    assert list(algorithm.annotators()) == READERS[recipe]


@pytest.mark.parametrize("recipe", [*READERS, *MORE])
def test_recipes_with_annotators_train(recipe):
    algorithm, feed = learner(Arithmetic(), recipe, prompts_per_update=2)
    for _ in range(2):
        metrics = algorithm.update(feed.next(algorithm))
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    feed.close()


@pytest.mark.parametrize("task", [Grid(), Calculator(), Waypoints()], ids=lambda task: task.name)
@pytest.mark.parametrize("recipe", ["segment_spo", "spae", "salt"])
def test_recipes_with_intermediate_states_train_on_conversations(recipe, task):
    algorithm, feed = learner(task, recipe, prompts_per_update=2, group_size=2)
    algorithm.update(feed.next(algorithm))
    feed.close()


def test_the_best_value_is_a_soft_maximum_over_eight_rollouts():
    """A*-PO (Brantley et al. 2025): beta_1 is 0.5."""
    found = BestValue().value(torch.tensor([[1.0] + [0.0] * 7, [1.0] * 8]))
    torch.testing.assert_close(found, torch.tensor([0.5 * math.log((math.exp(2.0) + 7.0) / 8.0), 1.0]))


@pytest.mark.parametrize(("recipe", "key"), [("a_star_po", "value_ref"), ("a_lol", "mean_ref")])
def test_task_values_are_soft_maxima_or_means_and_cached(recipe, key):
    _algorithm, feed, envs, rows = completed(Scale(), recipe)
    annotator = feed.annotators[key]
    annotator.known.clear()
    state = envs.initial.generator.get_state()
    value = annotator(envs, feed._batch.trajectories, rows).extra[key]
    envs.initial.generator.set_state(state)
    tasks = list({trajectory.task.key: trajectory.task for trajectory in feed._batch.trajectories}.values())
    found = envs.initial.rollout([task for task in tasks for _ in range(SAMPLES)])
    first = [trajectory.reward for trajectory in found[:SAMPLES]]
    best = BETA * math.log(sum(math.exp(reward / BETA) for reward in first) / SAMPLES)
    by_hand = best if key == "value_ref" else sum(first) / SAMPLES
    assert float(value[0]) == pytest.approx(by_hand, rel=1e-5)
    before = envs.initial.generated
    assert torch.equal(annotator(envs, feed._batch.trajectories, rows).extra[key], value)
    assert envs.initial.generated == before  # no new rollouts


@torch.no_grad()
def test_likelihood_uses_the_initial_policy():
    algorithm, feed, envs, rows = completed(Scale(), "self")
    with torch.enable_grad():
        algorithm.update(rows.with_fields(extra={**rows.extra, "likelihood": torch.zeros(len(rows))}))
    feed.annotators["unlikely"].known.clear()
    again = feed.annotators["unlikely"](envs, feed._batch.trajectories, rows)
    torch.testing.assert_close(again.extra["likelihood"], rows.extra["likelihood"])
    policy = algorithm.reference_policy
    loss, _ = policy.sft_loss([policy.tokenizer.prompt([str(int(rows.group[0]))])], [policy.encode_message("ab")])
    assert float(again.extra["likelihood"][0]) == pytest.approx(math.exp(-float(loss)), rel=1e-4)


def test_values_before_messages_come_from_rollouts_at_that_point():
    _algorithm, feed, envs, rows = completed(Grid(), "proact")
    trajectories = feed._batch.trajectories
    moments, places = cut_points(envs.current, trajectories)
    assert len(moments) == 3 + sum(int(trajectory.metrics["turns"]) - 1 for trajectory in trajectories)
    later = envs.current.rollout([moments[places[0][1]]] * ROLLOUTS)
    assert all(trajectory.record.responses[0] == trajectories[0].record.responses[0] for trajectory in later)
    unit, value = rows.require("unit"), rows.extra["rollout_value"]
    first = (unit == 0) & rows.valid()
    same = rows.require("group") == rows.require("group")[0]
    assert len(value[same][first[same]].unique()) == 1 and value.shape == rows.shape


def test_segments_start_after_every_fifth_uncertain_token():
    """Guo et al. 2025: certain tokens are not counted, each message restarts the count, and no cut is at its end."""
    logp = torch.tensor([[-1.0] * 6 + [0.0] * 3 + [-1.0] * 4 + [0.0] * 2 + [-1.0] * 7])
    mask = torch.ones_like(logp).bool()
    mask[0, 13:15] = False  # the reply
    unit = torch.tensor([[0] * 15 + [1] * 7])
    rows = Decisions(logp, mask=mask, unit=unit)
    assert segment_starts(rows, 5, 0.9)[0].nonzero()[:, 0].tolist() == [0, 5, 15, 20]
    assert segment_starts(rows, 1, 0.9)[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, *range(15, 22)]
    assert segment_starts(rows, 99, 0.9)[0].nonzero()[:, 0].tolist() == [0, 15]


def test_segment_values_come_from_rollouts_continued_at_the_cut():
    """Guo et al. 2025: rollouts continue the message at the cut, and the advantages telescope to the reward."""
    algorithm, feed, envs, rows = completed(Scale(), "segment_spo")
    feed.annotators["segments"] = annotator = SegmentValue(every=1, below=1.0)
    trajectories = feed._batch.trajectories
    split = annotator(envs, trajectories, envs.current.batch(trajectories))
    unit, own, value = split.require("unit"), split.valid(), split.require("value")
    assert all(unit[row][own[row]].tolist() == list(range(int(own[row].sum()))) for row in range(len(split)))
    row = int(own.sum(1).argmax())
    count = int(own[row].sum())
    assert count == 6 and rows.require("unit")[row].tolist() == [0] * 5 + [1]  # the recipe's own segments
    columns = [[] for _ in trajectories]
    columns[row] = [count - 1]
    moments, places = cut_points(envs.current, trajectories, columns)
    later = envs.current.rollout([moments[places[row][1]]] * ROLLOUTS)
    responses = trajectories[row].decisions.extra["tokens"][0, int(split.extra["start"][row]) :][: count - 1]
    for trajectory in later:
        start = int(trajectory.decisions.extra["start"])
        assert torch.equal(trajectory.decisions.extra["tokens"][0, start:][: count - 1], responses)
        assert trajectory.reward == len(trajectory.record.responses[0])
    gain = algorithm.recipe.advantage(split)[row][own[row]]
    assert float(gain.sum()) == pytest.approx(trajectories[row].reward - float(value[row][own[row]][0]), abs=1e-5)
    assert float(gain[-1]) == pytest.approx(trajectories[row].reward - float(value[row][count - 1]), abs=1e-5)


def test_rollout_values_are_discounted_by_the_gamma_of_the_advantage_source():
    found = {}
    for gamma in (1.0, 0.9):
        start = {"name": "gae", "gamma": gamma, "level": "unit", "rollout_weight": 0.5}
        annotator = requested_annotators({**DEFAULTS, **read_recipe("proact"), "advantage_source": start})[
            "rollout_weight"
        ]
        _algorithm, feed, envs, rows = completed(Errands(), "proact")
        found[gamma] = annotator(envs, feed._batch.trajectories, rows).extra["rollout_value"]
    turn, own = rows.require("unit"), rows.valid()
    for gamma, value in found.items():
        expected = torch.tensor([1.0 + gamma + gamma**2, 1.0 + gamma, 1.0])
        torch.testing.assert_close(value[own], expected[turn[own]])


@torch.no_grad()
def test_probes_score_the_answer_before_every_message():
    algorithm, feed, _worlds, rows = completed(Calculator(), "spae")
    accuracy, confidence = rows.extra["probe_accuracy"], rows.extra["probe_confidence"]
    trajectory, policy = feed._batch.trajectories[0], algorithm.policy
    answer = trajectory.record.episode.answer
    loss, info = policy.sft_loss(
        [policy.tokenizer.prompt([trajectory.record.episode.prompt])], [policy.encode_message(answer)]
    )
    assert float(accuracy[0, 0]) == pytest.approx(math.exp(-float(loss)), rel=1e-4)
    assert float(confidence[0, 0]) == pytest.approx(math.exp(-float(info["entropy"])), rel=1e-4)


def test_durations_count_the_tokens_of_a_message():
    _algorithm, _feed, _worlds, rows = completed(Grid(), "duration_aware")
    unit, duration = rows.require("unit")[0], rows.extra["duration"][0]
    for number in unit.unique().tolist():
        own = (unit == number) & rows.valid()[0]
        assert duration[own].unique().tolist() == [int(own.sum())]


@pytest.mark.parametrize("recipe", ["a_star_po", "proact"])
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


def test_trajectories_of_remote_workers_cannot_be_continued():
    _algorithm, feed, envs, _rows = completed(Grid(), "segment_spo")
    with pytest.raises(UserError, match="needs num_workers=0"):
        cut_points(envs.current, [replace(feed._batch.trajectories[0], record=None)])


def test_objective_weights_follow_the_learner_gradients_and_resume():
    """Lu et al. 2025 (b), against autograd of the explicit loss."""
    algorithm, feed = learner(Scale(), "gradient_weights", group_size=4)
    weights = feed.collector.reward.parts[0]
    weights.weighted_objectives = feed.collector.reward.weighted_objectives = (
        "reward",
        "length",
        "truncated",
    )  # these differ without training
    rows = feed.next(algorithm)
    worth, group = rows.extra["objectives"], rows.require("group")
    assert worth.shape == (len(rows), 3)
    metrics_of_rows = [trajectory.metrics for trajectory in feed._batch.trajectories]
    assert worth[:, 1:].tolist() == [[metrics["length"], metrics["truncated"]] for metrics in metrics_of_rows]
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


def test_the_last_batch_is_rescored_by_the_gain_in_reward():
    """Wang et al. 2026: replayed rows have zero advantage without a reward gain, and nonzero advantage with one."""
    algorithm, feed = learner(Scale(), "pipo", group_size=4)
    stage = algorithm.recipe.pipeline.stages[-1]
    for _ in range(2):
        rows = feed.next(algorithm)
        algorithm.update(rows)
    again = rows.source == 1
    assert int(again.sum()) == len(rows) / 2 and bool((algorithm.advantage[again] == 0).all())
    stage.rewards = [0.0, 0.1] * 4  # all new rewards are higher
    rows = feed.next(algorithm)
    algorithm.update(rows)
    again = rows.source == 1
    assert bool((algorithm.advantage[again] != 0).any()) and float(algorithm.advantage[again].abs().max()) <= 10.0


def test_the_hypervolume_gain_of_a_batch_is_stored():
    """Lu et al. 2025 (a)."""
    algorithm, feed = learner(Arithmetic(), "hypervolume")
    feed.next(algorithm)
    part = feed.collector.reward.parts[1]
    assert len(part.front) <= 1 and part.gain >= 0.0
    algorithm.update(feed.next(algorithm))
    assert feed.state_dict()["collector"]["reward"]["1"]["gain"] == part.gain
