"""A text task as the world of the sampling side: attempts, rows, and what samplers ask of it."""

import math
from dataclasses import replace

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec
from robopolicy.text.datasets import PromptTask
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.rollouts.protocols import Task, able
from robopolicy.text.rollouts.strategies import Flat
from robopolicy.text.rollouts.trajectories import from_dict, to_dict
from robopolicy.text.task import Episode, Question, TextTask, Turn
from robopolicy.text.text_env import TextWorld, score
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import CALL, Calculator
from robopolicy_tasks.text.grid import Grid


def world_of(task, seed=0):
    torch.manual_seed(seed)
    spec = PolicySpec({"text": (task.prompt_bytes,)}, task.completion_bytes)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=160), spec)
    return TextWorld(policy, task, torch.Generator().manual_seed(seed))


def tasks(budget=3, keys=(5, 6), temperature=1.0):
    return [Task(key, payload=key, budget=budget, temperature=temperature) for key in keys]


@pytest.mark.parametrize("task", [Arithmetic(), Grid()], ids=["one turn", "turns"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_ratio_of_a_batch_is_one(task, temperature):
    world = world_of(task)
    batch = world.batch(Flat().rollout(world, tasks(temperature=temperature)))
    assert len(batch) == 6 and batch.group.tolist() == [5, 5, 5, 6, 6, 6]
    out = score(world.policy, batch)
    torch.testing.assert_close(out.logp, batch.logp_old, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.entropy, batch.entropy, rtol=0, atol=1e-4)


def test_only_what_the_policy_wrote_is_a_decision():
    world = world_of(Grid())
    attempt = Flat().rollout(world, tasks(1, (5,)))[0]
    decisions, talk = attempt.decisions, attempt.record
    tokens, start = decisions.extra["tokens"][0], int(decisions.extra["start"])
    written = [token for token, own in zip(tokens[start:].tolist(), decisions.mask[0].tolist(), strict=True) if own]
    assert attempt.metrics["turns"] == 8 == len(talk.said)
    assert world.policy.tokenizer.decode(written) == "".join(talk.said)
    assert decisions.unit[0].max() == 7
    prompt = world.policy.tokenizer.decode(tokens[:start].tolist())
    assert prompt == Grid().episode(5).prompt
    whole = world.policy.tokenizer.decode(tokens.tolist())
    assert whole.count(" at ") == 8  # the prompt's and a reply between each two messages


def test_calls_and_form_are_measured():
    seeds = [seed for seed in range(40) if Calculator().episode(seed).demonstration()[0] == CALL]
    world = world_of(Calculator())
    talk = world.start(Task(seeds[0], payload=seeds[0]))
    for message in talk.episode.demonstration():
        world.append(talk, message, own=True)
    asked = world.attempt_of(talk)
    assert asked.metrics["calls"] == 1.0 == asked.metrics["format"] and asked.metrics["turns"] == 2 and asked.success
    assert int(asked.decisions.extra["first_event"]) == 0 and asked.metrics["helped"] == 0.0
    wrong = world.play([Task(1, payload=1)])[0]
    assert wrong.metrics["calls"] == 0.0 == wrong.metrics["format"]  # a fresh policy writes no number
    assert int(wrong.decisions.extra["first_event"]) == -1
    assert "calls" not in world_of(Arithmetic()).play([Task(1, payload=1)])[0].metrics


def test_what_was_chosen_stands_beside_its_decision():
    world = world_of(Arithmetic())
    batch = world.batch(Flat().rollout(world, tasks()))
    for row in range(len(batch)):
        start, own = int(batch.extra["start"][row]), batch.valid()[row]
        count = int(own.sum())
        assert torch.equal(batch.extra["chosen"][row][own], batch.extra["tokens"][row, start : start + count])


def test_a_group_reads_its_prompt_once(monkeypatch):
    from robopolicy.text import generation

    sizes, inner = [], generation.call

    def watched(model, tokens, *args):
        sizes.append(tuple(tokens.shape))
        return inner(model, tokens, *args)

    monkeypatch.setattr(generation, "call", watched)
    Flat().rollout(world := world_of(Arithmetic()), tasks(8))
    assert sizes[0][0] == 2 and sizes[1] == (16, 1)
    assert world.generated > 0


class Broken(TextTask):
    name, prompt_bytes, completion_bytes, seconds = "text/broken", 8, 4, 0.5

    def episode(self, seed):
        def verify(completion):
            return float("nan") if seed == 6 else 1.0

        return Question(str(seed), verify, "ok")


def test_an_attempt_that_cannot_be_judged_has_no_decisions():
    world = world_of(Broken())
    attempts = Flat().rollout(world, tasks(2))
    assert [attempt.metrics["fault"] for attempt in attempts] == [0.0, 0.0, 1.0, 1.0]
    assert [math.isnan(attempt.reward) for attempt in attempts] == [False, False, True, True]
    batch = world.batch(attempts)
    assert batch.valid().any(1).tolist() == [True, True, False, False]
    assert {fault.key for fault in world.guard.take()} == {6}


def test_abilities_are_methods_or_named_functions(monkeypatch):
    world = world_of(Grid())
    assert able(world, "branch") == world.branch
    monkeypatch.setattr(TextWorld, "abilities", {"solved": lambda env, task: env.solution(task)})
    assert able(world, "solved")(Task(3, payload=3)) == Grid().episode(3).demonstration()
    with pytest.raises(UserError, match="ability 'unheard', which TextWorld lacks"):
        able(world, "unheard")


def test_branches_keep_the_decisions_before_them():
    world = world_of(Grid())
    first = world.play(tasks(1, (5,)))[0]
    branched = world.play([world.branch(first, 3)])[0]
    own, unit = first.decisions.mask[0], first.decisions.unit[0]
    kept = int((own & (unit == 3)).int().argmax())  # the reply to the third message is seen
    assert not own[kept - 1] and unit[kept - 1] == 3
    for name in ("logp_old", "mask", "unit"):
        one, two = (getattr(attempt.decisions, name)[0, :kept] for attempt in (first, branched))
        assert torch.equal(one, two)
    seen = [
        attempt.decisions.extra["tokens"][0, : int(attempt.decisions.extra["start"]) + kept]
        for attempt in (first, branched)
    ]
    assert torch.equal(*seen)
    assert branched.record.said[:3] == first.record.said[:3]
    batch = world.batch([branched])
    torch.testing.assert_close(score(world.policy, batch).logp, batch.logp_old, rtol=0, atol=2e-5)


def test_attempts_survive_a_checkpoint():
    world = world_of(Grid())
    attempt = world.play(tasks(1, (5,)))[0]
    again = from_dict(to_dict(attempt))
    assert torch.equal(again.decisions.extra["tokens"], attempt.decisions.extra["tokens"])


def test_what_was_heard_said_and_answered_has_a_number():
    world = world_of(Grid())
    attempts = world.play(tasks(1, (5, 5, 6)))
    batch = world.batch(attempts)
    first = batch.extra["observation"][:, 0]
    assert first[0] == first[1] != first[2]  # the prompt
    for row, attempt in enumerate(attempts):
        said, unit = attempt.record.said, batch.unit[row]
        for one in range(len(said)):
            for other in range(len(said)):
                same = batch.extra["action"][row][unit == one][0] == batch.extra["action"][row][unit == other][0]
                assert same == (said[one].strip() == said[other].strip())
    ends = batch.extra["structural"]
    chosen = batch.extra["chosen"]
    assert torch.equal(ends, batch.valid() & (chosen == world.policy.tokenizer.eos))
    assert (batch.extra["answer"][0] == batch.extra["answer"][1]) == (
        attempts[0].record.said[-1].strip() == attempts[1].record.said[-1].strip()
    )


def test_gates_are_beginnings_of_messages():
    world = world_of(Calculator())
    attempt = world.play(tasks(1, (5,)))[0]
    decisions = attempt.decisions
    gate, unit = decisions.extra["gate"][0], decisions.unit[0]
    assert int(gate.sum()) == int(attempt.metrics["turns"])
    for number in unit[gate].tolist():
        own = decisions.mask[0] & (unit == number)
        assert gate[own][0] and not gate[own][1:].any()
    assert attempt.metrics["brevity"] == 1.0 - attempt.metrics["length"] / (6 * 3)
    assert attempt.metrics["malformed"] == 1.0 - attempt.metrics["format"]


def test_problems_have_kinds_and_answers_have_progress():
    from robopolicy_tasks.text.countdown import Countdown

    arithmetic = Arithmetic()
    assert {arithmetic.category(seed) for seed in range(60)} == {0, 1, 2}
    for seed in range(20):
        episode = arithmetic.episode(seed)
        right = episode.demonstration()[0]
        assert episode.step(right).measures["progress"] == 1.0
        wrong = episode.step(right[:-1] + str((int(right[-1]) + 1) % 10)).measures["progress"]
        assert wrong == pytest.approx((len(right) - 1) / len(right))
        countdown = Countdown().episode(seed)
        assert countdown.step(countdown.demonstration()[0]).measures["progress"] == 1.0
        assert countdown.step("x").measures["progress"] == 0.0


class Instruction(Episode):
    """Three turns, of which each earns something."""

    prompt = "go"

    def __init__(self, paid):
        self.paid, self.turn = paid, 0

    def step(self, completion):
        self.turn += 1
        return Turn(self.paid[self.turn - 1], success=True, done=self.turn == len(self.paid), reply="on")


class Errands(TextTask):
    """The same instruction for all seeds."""

    name, prompt_bytes, completion_bytes, max_turns = "text/errands", 48, 4, 3

    def __init__(self, *paid):
        self.paid = paid

    def episode(self, seed):
        return Instruction(self.paid)


def test_answers_are_what_messages_state(tmp_path):
    """Consistency (COPO) compares answers, however they are worded, where the verifier reads them out."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "7+7=", "answer": "14", "verify": "number"}\n')
    said = ["it is 14", "so: 14.0", "13", "none", "none ", "nothing"]
    found = {}
    for task in (PromptTask(str(file)), Arithmetic()):
        world = world_of(Arithmetic())
        world.task = task
        talks = [world.start(one) for one in tasks(1, (0,) * len(said))]
        for talk, message in zip(talks, said, strict=True):
            world.append(talk, message, own=True)
        numbers = [int(attempt.decisions.extra["answer"]) for attempt in world.attempts_of(talks)]
        found[task.name] = [numbers.index(number) for number in numbers]
    assert list(found.values()) == [[0, 0, 2, 3, 3, 5], [0, 1, 2, 3, 3, 5]]


def test_rewards_stay_with_their_turns():
    world = world_of(Errands(1.0, 0.25, 0.25))
    attempts = world.play(tasks(1))
    assert [attempt.reward for attempt in attempts] == [1.5, 1.5]
    shaped = [replace(attempts[0], reward=1.75), attempts[1]]  # a part of the reward that belongs to no turn
    batch = world.batch(shaped)
    for row, last in enumerate((0.5, 0.25)):
        own, unit = batch.valid()[row], batch.unit[row]
        assert [float(batch.reward[row][own & (unit == turn)].sum()) for turn in range(3)] == [1.0, 0.25, last]
        ends = [int((own & (unit == turn)).nonzero().max()) for turn in range(3)]
        assert batch.reward[row].nonzero()[:, 0].tolist() == ends


def test_the_reward_of_one_turn_stands_at_its_end():
    world = world_of(Errands(0.1))
    attempts = world.play(tasks(1))
    composed = [0.3 * attempts[0].reward - 0.07, attempts[1].reward]
    batch = world.batch([replace(attempt, reward=worth) for attempt, worth in zip(attempts, composed, strict=True)])
    for row, worth in enumerate(composed):
        expected = torch.zeros_like(batch.reward[row])
        expected[int(batch.valid()[row].nonzero().max())] = worth
        assert torch.equal(batch.reward[row], expected)
