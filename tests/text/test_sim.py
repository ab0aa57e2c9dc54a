"""Tests of text tasks under the simulator contract, their experts, and reward errors."""

import time

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.text import reward_runner as guarding
from robopolicy.text.reward_runner import RewardRunner
from robopolicy.text.sim import TextSim
from robopolicy.text.task import SingleTurn, TextTask, Turn, pack, unpack
from robopolicy_tasks.text.countdown import value_of

NAMES = ["text/arithmetic", "text/countdown", "text/grid", "reasoning_gym/chain_sum"]


class Faulty(TextTask):
    """Rewards by seed modulo 4: correct, raises, hangs, not a number."""

    name, prompt_bytes, completion_bytes, reward_timeout = "text/faulty", 8, 4, 0.1

    def episode(self, seed):
        def verify(completion):
            if seed % 4 == 1:
                raise ZeroDivisionError("by zero")
            if seed % 4 == 2:
                time.sleep(0.4)
            return float("nan") if seed % 4 == 3 else 1.0

        return SingleTurn(str(seed), verify)

    def is_held_out(self, seed):
        return True


@pytest.mark.parametrize("name", NAMES)
def test_text_tasks_satisfy_the_contract(name):
    def make(count):
        return make_sim(name, SimOptions(num_envs=count))

    assert check_simulator(make(3), make) == []


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_succeed(name):
    entry = get_task(name)
    sim = make_sim(name, SimOptions(num_envs=4))
    result = evaluate(ExpertActor(entry.require_expert()()), sim, episodes=12)
    assert result.success is not None and result.success.all()


def test_a_text_policy_is_evaluated_like_any_other(policy):
    sim = make_sim("text/grid", SimOptions(num_envs=3))
    from robopolicy.spec import PolicySpec
    from robopolicy.text.policy import TextConfig, TextPolicy

    walker = TextPolicy(TextConfig(width=16, layers=1, heads=1), PolicySpec({"text": (96,)}, 3))
    few = evaluate(walker, sim, episodes=5, deterministic=False)
    many = evaluate(walker, make_sim("text/grid", SimOptions(num_envs=5)), episodes=5, deterministic=False)
    assert few.lengths.max() <= 8
    assert (few.returns == many.returns).all()


def test_reward_errors_name_the_prompt_and_fail_only_their_row():
    sim = TextSim(Faulty(), SimOptions(num_envs=4))
    sim.reset(100)
    step = sim.step(pack(["a"] * 4, 4))
    assert step.reward.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert step.done.all() and torch.isfinite(step.reward).all()
    reward_errors = sim.reward_errors()
    assert [(error.key, error.kind) for error in reward_errors] == [
        (101, "raised"),
        (102, "timed out"),
        (103, "not finite"),
    ]
    assert str(reward_errors[0]) == "prompt 101: the reward raised (ZeroDivisionError: by zero)"
    assert sim.reward_errors() == []


def test_a_reward_that_always_hangs_is_refused(monkeypatch):
    monkeypatch.setattr(guarding, "MAX_HUNG_CALLS", 1)
    reward_runner = RewardRunner(0.02)
    episode = Faulty().episode(2)
    assert reward_runner.step(episode, "", 2) is None
    with pytest.raises(UserError, match="calls of the reward function hang"):
        reward_runner.step(episode, "", 2)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a" * 9, "has 9 bytes, but at most 8 are possible"),
        ("a\0b", r"contains U\+0000 as character 2, which ends a text"),
        ("ab\x1e", r"contains U\+001E as character 3, which separates messages"),
        ("\udc80", r"contains U\+DC80 as character 1, half of a surrogate pair"),
    ],
)
def test_invalid_prompt_is_refused_by_name(prompt, message):
    class Odd(Faulty):
        def episode(self, seed):
            return SingleTurn(prompt, float)

    with pytest.raises(UserError, match=rf"Prompt \d of text/faulty {message}"):
        TextSim(Odd(), SimOptions(num_envs=1)).reset(5)


def test_invalid_reply_is_a_reward_error():
    class Mute(SingleTurn):
        def step(self, completion):
            return Turn(1.0, done=False, reply="a\0")

    reward_runner = RewardRunner(1.0)
    assert reward_runner.step(Mute("?", float), "", 3) is None
    assert [(error.kind, error.message[:25]) for error in reward_runner.pop_errors()] == [
        ("not readable", "its reply contains U+0000")
    ]
    reward_runner.close()


def test_observations_contain_the_messages_of_both_sides():
    sim = make_sim("text/grid", SimOptions(num_envs=1))
    first = unpack(sim.reset(3)["text"])[0]
    step = sim.step(pack(["x"], 3))
    assert unpack(step.obs["text"])[0].startswith(f"{first}\x1ex\x1e at ")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*5+7-1", 21),
        ("3+5*7*2", 73),
        ("9-2-3-1", 3),
        ("2-3*4+1", -9),
        ("2*3-4*5", -14),
        ("3+5", 8),
        ("3+", None),
        ("a", None),
    ],
)
def test_expressions_are_evaluated_with_precedence(expression, value):
    found = value_of(expression)
    assert (None if found is None else found[0]) == value


def test_calls_after_a_hanging_call_run_once():
    seen = []

    class Listener(SingleTurn):
        def step(self, completion):
            if completion == "hang":
                time.sleep(0.4)
            seen.append(completion)
            return super().step(completion)

    reward_runner = RewardRunner(0.1)
    messages = ["a", "hang", "b", "bad", "c"]
    episodes = [Listener(text, lambda completion: 1 / 0 if completion == "bad" else 1.0) for text in messages]
    turns = reward_runner.steps(
        [(episode, text, key) for key, (episode, text) in enumerate(zip(episodes, messages, strict=True))]
    )
    assert [turn is not None for turn in turns] == [True, False, True, False, True]
    assert [error.kind for error in reward_runner.pop_errors()] == ["timed out", "raised"]
    time.sleep(0.5)  # until the hanging call returns
    assert sorted(seen) == sorted(messages)
    reward_runner.close()
