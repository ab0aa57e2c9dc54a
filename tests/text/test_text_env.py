"""Tests of text tasks as rollout environments: rollouts, rows, and the capabilities that samplers require."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from env_of_text import env_of

from robopolicy.errors import UserError
from robopolicy.text.datasets import PromptTask
from robopolicy.text.rollouts.protocols import Task, require_capability
from robopolicy.text.rollouts.strategies import Independent
from robopolicy.text.rollouts.trajectories import from_dict, to_dict
from robopolicy.text.task import SingleTurn, TextEpisode, TextTask, Turn
from robopolicy.text.text_env import TextEnv, score
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import CALL, Calculator
from robopolicy_tasks.text.grid import Grid


def tasks(budget=3, keys=(5, 6), temperature=1.0):
    return [Task(key, payload=key, budget=budget, temperature=temperature) for key in keys]


@pytest.mark.parametrize("task", [Arithmetic(), Grid()], ids=["one turn", "turns"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_ratio_of_a_batch_is_one(task, temperature):
    env = env_of(task)
    batch = env.batch(Independent().rollout(env, tasks(temperature=temperature)))
    assert len(batch) == 6 and batch.group.tolist() == [5, 5, 5, 6, 6, 6]
    out = score(env.policy, batch)
    torch.testing.assert_close(out.logp, batch.logp_old, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.entropy, batch.entropy, rtol=0, atol=1e-4)


def test_only_tokens_of_the_policy_are_decisions():
    env = env_of(Grid())
    trajectory: Any = Independent().rollout(env, tasks(1, (5,)))[0]
    decisions, conversation = trajectory.decisions, trajectory.record
    tokens, start = decisions.extra["tokens"][0], int(decisions.extra["start"])
    written = [token for token, own in zip(tokens[start:].tolist(), decisions.mask[0].tolist(), strict=True) if own]
    assert trajectory.metrics["turns"] == 8 == len(conversation.responses)
    assert env.policy.tokenizer.decode(written) == "".join(conversation.responses)
    assert decisions.unit[0].max() == 7
    prompt = env.policy.tokenizer.decode(tokens[:start].tolist())
    assert prompt == Grid().episode(5).prompt
    whole = env.policy.tokenizer.decode(tokens.tolist())
    assert whole.count(" at ") == 8  # the prompt's and a reply between each two messages


def test_trajectory_metrics_report_tool_calls_and_format():
    seeds = [seed for seed in range(40) if Calculator().episode(seed).demonstration()[0] == CALL]
    env = env_of(Calculator())
    conversation = env.start_conversation(Task(seeds[0], payload=seeds[0]))
    for message in conversation.episode.demonstration():
        env.append_message(conversation, message, own=True)
    asked = env.trajectory_of(conversation)
    assert asked.metrics["calls"] == 1.0 == asked.metrics["format"] and asked.metrics["turns"] == 2 and asked.success
    assert int(asked.decisions.extra["first_event"]) == 0 and asked.metrics["assisted"] == 0.0
    wrong = env.rollout([Task(1, payload=1)])[0]
    assert wrong.metrics["calls"] == 0.0 == wrong.metrics["format"]  # a fresh policy writes no number
    assert int(wrong.decisions.extra["first_event"]) == -1
    assert "calls" not in env_of(Arithmetic()).rollout([Task(1, payload=1)])[0].metrics


def test_chosen_tokens_are_aligned_with_their_decisions():
    env = env_of(Arithmetic())
    batch = env.batch(Independent().rollout(env, tasks()))
    for row in range(len(batch)):
        start, own = int(batch.extra["start"][row]), batch.valid()[row]
        count = int(own.sum())
        assert torch.equal(batch.extra["chosen"][row][own], batch.extra["tokens"][row, start : start + count])


def test_group_encodes_its_prompt_once(monkeypatch):
    from robopolicy.text import generation

    sizes, inner = [], generation.run_body

    def watched(model, tokens, *args, **named):
        sizes.append(tuple(tokens.shape))
        return inner(model, tokens, *args, **named)

    monkeypatch.setattr(generation, "run_body", watched)
    Independent().rollout(env := env_of(Arithmetic()), tasks(8))
    assert sizes[0][0] == 2 and sizes[1] == (16, 1)
    assert env.generated > 0


class Broken(TextTask):
    name, prompt_bytes, completion_bytes, reward_timeout = "text/broken", 8, 4, 0.5

    def episode(self, seed):
        def verify(completion):
            return float("nan") if seed == 6 else 1.0

        return SingleTurn(str(seed), verify, "ok")


def test_rollout_with_a_failed_reward_has_no_decisions():
    env = env_of(Broken())
    trajectories = Independent().rollout(env, tasks(2))
    assert [trajectory.metrics["reward_failed"] for trajectory in trajectories] == [0.0, 0.0, 1.0, 1.0]
    assert [math.isnan(trajectory.reward) for trajectory in trajectories] == [False, False, True, True]
    batch = env.batch(trajectories)
    assert batch.valid().any(1).tolist() == [True, True, False, False]
    assert {reward_failed.key for reward_failed in env.reward_runner.pop_errors()} == {6}


def test_capabilities_are_methods_or_named_functions(monkeypatch):
    env = env_of(Grid())
    assert require_capability(env, "branch") == env.branch
    monkeypatch.setattr(TextEnv, "capabilities", {"solved": lambda env, task: env.solution(task)})
    assert require_capability(env, "solved")(Task(3, payload=3)) == Grid().episode(3).demonstration()
    with pytest.raises(UserError, match="capability 'unheard', which TextEnv lacks"):
        require_capability(env, "unheard")


def test_branches_keep_the_decisions_before_them():
    env = env_of(Grid())
    first = env.rollout(tasks(1, (5,)))[0]
    branched = env.rollout([env.branch(first, 3)])[0]
    own, unit = first.decisions.mask[0], first.decisions.unit[0]
    kept = int((own & (unit == 3)).int().argmax())  # the reply to the third message is seen
    assert not own[kept - 1] and unit[kept - 1] == 3
    for name in ("logp_old", "mask", "unit"):
        one, two = (getattr(trajectory.decisions, name)[0, :kept] for trajectory in (first, branched))
        assert torch.equal(one, two)
    seen = [
        trajectory.decisions.extra["tokens"][0, : int(trajectory.decisions.extra["start"]) + kept]
        for trajectory in (first, branched)
    ]
    assert torch.equal(*seen)
    assert branched.record.responses[:3] == first.record.responses[:3]
    batch = env.batch([branched])
    torch.testing.assert_close(score(env.policy, batch).logp, batch.logp_old, rtol=0, atol=2e-5)


def test_rollouts_round_trip_through_a_checkpoint():
    env = env_of(Grid())
    trajectory = env.rollout(tasks(1, (5,)))[0]
    again = from_dict(to_dict(trajectory))
    assert torch.equal(again.decisions.extra["tokens"], trajectory.decisions.extra["tokens"])


def test_observations_actions_and_answers_have_numbers():
    env = env_of(Grid())
    trajectories = env.rollout(tasks(1, (5, 5, 6)))
    batch = env.batch(trajectories)
    first = batch.extra["observation"][:, 0]
    assert first[0] == first[1] != first[2]  # the prompt
    for row, trajectory in enumerate(trajectories):
        responses, unit = trajectory.record.responses, batch.unit[row]
        for one in range(len(responses)):
            for other in range(len(responses)):
                same = batch.extra["action"][row][unit == one][0] == batch.extra["action"][row][unit == other][0]
                assert same == (responses[one].strip() == responses[other].strip())
    ends = batch.extra["structural"]
    chosen = batch.extra["chosen"]
    assert torch.equal(ends, batch.valid() & (chosen == env.policy.tokenizer.eos))
    assert (batch.extra["answer"][0] == batch.extra["answer"][1]) == (
        trajectories[0].record.responses[-1].strip() == trajectories[1].record.responses[-1].strip()
    )


def test_gates_mark_the_first_tokens_of_messages():
    env = env_of(Calculator())
    trajectory = env.rollout(tasks(1, (5,)))[0]
    decisions = trajectory.decisions
    gate, unit = decisions.extra["gate"][0], decisions.unit[0]
    assert int(gate.sum()) == int(trajectory.metrics["turns"])
    for number in unit[gate].tolist():
        own = decisions.mask[0] & (unit == number)
        assert gate[own][0] and not gate[own][1:].any()
    assert trajectory.metrics["brevity"] == 1.0 - trajectory.metrics["length"] / (6 * 3)
    assert trajectory.metrics["malformed"] == 1.0 - trajectory.metrics["format"]


def test_problems_have_categories_and_answers_have_progress():
    from robopolicy_tasks.text.countdown import Countdown

    arithmetic = Arithmetic()
    assert {arithmetic.category(seed) for seed in range(60)} == {0, 1}
    for seed in range(20):
        episode: Any = arithmetic.episode(seed)
        right = episode.demonstration()[0]
        assert episode.step(right).metrics["progress"] == 1.0
        wrong = episode.step(right[:-1] + str((int(right[-1]) + 1) % 10)).metrics["progress"]
        assert wrong == pytest.approx((len(right) - 1) / len(right))
        countdown: Any = Countdown().episode(seed)
        assert countdown.step(countdown.demonstration()[0]).metrics["progress"] == 1.0
        assert countdown.step("x").metrics["progress"] == 0.0


class Instruction(TextEpisode):
    """An episode with a given reward in each turn."""

    prompt = "go"

    def __init__(self, turn_rewards):
        self.turn_rewards, self.turn = turn_rewards, 0

    def step(self, completion):
        self.turn += 1
        return Turn(
            self.turn_rewards[self.turn - 1], success=True, done=self.turn == len(self.turn_rewards), reply="on"
        )


class Errands(TextTask):
    """The same episode for all seeds."""

    name, prompt_bytes, completion_bytes, max_turns = "text/errands", 48, 4, 3

    def __init__(self, *turn_rewards):
        self.turn_rewards = turn_rewards

    def episode(self, seed):
        return Instruction(self.turn_rewards)


def test_answers_are_read_by_the_verifier(tmp_path):
    """Consistency (Han et al. 2025) compares the answers that the verifier reads, not their wording."""
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "7+7=", "answer": "14", "verify": "number"}\n')
    responses = ["it is 14", "so: 14.0", "13", "none", "none ", "nothing"]
    found = {}
    for task in (PromptTask(str(file)), Arithmetic()):
        env = env_of(Arithmetic())
        env.task = task
        conversations = [env.start_conversation(one) for one in tasks(1, (0,) * len(responses))]
        for conversation, message in zip(conversations, responses, strict=True):
            env.append_message(conversation, message, own=True)
        numbers = [int(trajectory.decisions.extra["answer"]) for trajectory in env.trajectories_of(conversations)]
        found[task.name] = [numbers.index(number) for number in numbers]
    assert list(found.values()) == [[0, 0, 2, 3, 3, 5], [0, 1, 2, 3, 3, 5]]


def test_turn_rewards_are_assigned_to_the_last_token_of_each_turn():
    env = env_of(Errands(1.0, 0.25, 0.25))
    trajectories = env.rollout(tasks(1))
    assert [trajectory.reward for trajectory in trajectories] == [1.5, 1.5]
    shaped = [replace(trajectories[0], reward=1.75), trajectories[1]]  # a part of the reward that belongs to no turn
    batch = env.batch(shaped)
    for row, last in enumerate((0.5, 0.25)):
        own, unit = batch.valid()[row], batch.unit[row]
        assert [float(batch.reward[row][own & (unit == turn)].sum()) for turn in range(3)] == [1.0, 0.25, last]
        ends = [int((own & (unit == turn)).nonzero().max()) for turn in range(3)]
        assert batch.reward[row].nonzero()[:, 0].tolist() == ends


def test_reward_of_one_turn_is_at_its_last_token():
    env = env_of(Errands(0.1))
    trajectories = env.rollout(tasks(1))
    composed = [0.3 * trajectories[0].reward - 0.07, trajectories[1].reward]
    batch = env.batch(
        [replace(trajectory, reward=worth) for trajectory, worth in zip(trajectories, composed, strict=True)]
    )
    for row, worth in enumerate(composed):
        expected = torch.zeros_like(batch.reward[row])
        expected[int(batch.valid()[row].nonzero().max())] = worth
        assert torch.equal(batch.reward[row], expected)
