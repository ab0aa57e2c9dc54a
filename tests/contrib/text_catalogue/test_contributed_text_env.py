"""Tests of a text task as a rollout environment: rollouts, rows, and the capabilities that samplers require."""

import pytest
import torch
from env_of_text import env_of

from robopolicy.contrib.text_catalogue.advantage_sources import unit_reward
from robopolicy.contrib.text_catalogue.annotators import return_to_go
from robopolicy.contrib.text_catalogue.windows import SegmentRollouts
from robopolicy.core.registry import build
from robopolicy.errors import UserError
from robopolicy.recipe_files import read_recipe
from robopolicy.text.rollouts.collector import INTERVENTIONS
from robopolicy.text.rollouts.protocols import TEACHER, Task, require_capability, rewards_of
from robopolicy.text.task import TextEpisode, TextTask, Turn, truncate
from robopolicy.text.text_env import score
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import Calculator
from robopolicy_tasks.text.grid import Grid


def tasks(budget=3, keys=(5, 6), temperature=1.0):
    return [Task(key, payload=key, budget=budget, temperature=temperature) for key in keys]


def test_capabilities():
    env = env_of(Grid())
    for ability in ("hint", "start_from_solution", "repair", "rescore", "rewrite", "summarize", "teach"):
        assert callable(require_capability(env, ability))
    with pytest.raises(UserError, match="capability 'inpaint', which TextEnv lacks"):
        require_capability(env, "inpaint")


def test_solutions_are_taught_with_probability_one():
    env = env_of(Grid())
    (taught,) = require_capability(env, "teach")(
        tasks()[0], 2
    )  # one solution exists, and a repeated row would count twice
    assert require_capability(env, "teach")(tasks()[0], 0) == []
    assert taught.success and taught.source == TEACHER
    assert (taught.decisions.logp_old == 0).all()
    assert torch.isfinite(score(env.policy, env.batch([taught])).logp).all()


@pytest.mark.parametrize("task", [Arithmetic(), Grid()], ids=["one turn", "turns"])
def test_given_prefix_tokens_are_not_decisions(task):
    env = env_of(task)
    key = next(key for key in range(50) if len(" ".join(task.episode(key).demonstration())) > 1)
    started = require_capability(env, "start_from_solution")(tasks(1, (key,))[0], 0.7)
    trajectory = env.rollout([started])[0]
    given = started.prefix["tokens"]
    assert given and not trajectory.decisions.mask[0, : len(given)].any()
    batch = env.batch([trajectory])
    torch.testing.assert_close(score(env.policy, batch).logp, batch.logp_old, rtol=0, atol=2e-5)
    whole = require_capability(env, "start_from_solution")(tasks()[0], 0.0)
    assert whole.prefix["tokens"] == []


def test_hints_change_the_prompt_and_rescoring_stores_both_log_probabilities():
    env = env_of(Arithmetic())
    task = tasks(1, (5,))[0]
    hinted = require_capability(env, "hint")(task, "solution", 1.0)
    trajectory = env.rollout([hinted])[0]
    (plain,) = require_capability(env, "rescore")([trajectory], [task])
    assert torch.equal(plain.decisions.logp_behaviour, trajectory.decisions.logp_old)
    assert not torch.allclose(plain.decisions.logp_old, trajectory.decisions.logp_old)
    batch = env.batch([plain])
    torch.testing.assert_close(score(env.policy, batch).logp, batch.logp_old, rtol=0, atol=2e-5)


def test_rollout_interventions_run_on_text():
    env = env_of(Arithmetic())
    task = tasks(4, (5,))[0]
    group = env.rollout([task] * 4)
    for name in ("hint", "graded_hints", "teacher", "demonstration", "self_correct", "replay", "drop"):
        part = INTERVENTIONS[name]()
        if part.applies(rewards_of(group)):
            rows = part.apply(group, env)
            if rows:
                batch = env.batch(rows)
                assert torch.isfinite(score(env.policy, batch).logp).all()


def test_scaf_grpo_hints_reveal_growing_prefixes_of_the_solution(monkeypatch):
    env, (task,) = env_of(Grid()), tasks(1, (10,))
    hints = []
    plain = require_capability(env, "hint")
    monkeypatch.setattr(env, "hint", lambda *arguments: hints.append(plain(*arguments)) or hints[-1], raising=False)
    (entry,) = read_recipe("scaf_grpo")["rollout"]["intervention"]
    build("intervention", entry).apply(env.rollout([task] * 2), env)
    solution = " ".join(Grid().episode(10).demonstration())
    texts = [hint.context["text"] for hint in hints]
    assert texts == [solution[: round(share * len(solution))] for share in (0.25, 0.5, 0.75, 1.0)]
    assert len(set(texts)) == 4


def test_paraphrased_problems_have_the_same_answer():
    env, arithmetic = env_of(Arithmetic()), Arithmetic()
    for seed in range(12):
        problem = arithmetic.episode(seed)
        for how in ("varied", "simpler"):
            again = require_capability(env, "rewrite")(Task(seed, payload=seed, prefix={}), how)
            other = arithmetic.episode(again.payload)
            assert other.demonstration() == problem.demonstration() and again.prefix is None
            if again.key != seed:
                assert set(other.prompt[:-1].split("+")) != set(problem.prompt[:-1].split("+"))
                assert how == "varied" or arithmetic.difficulty(again.payload) < arithmetic.difficulty(seed)
    with pytest.raises(UserError, match="text/grid cannot paraphrase"):
        require_capability(env_of(Grid()), "rewrite")(Task(3, payload=3), "simpler")


def test_segment_windows_resume_from_the_written_summaries():
    """Lu et al. 2025: one row per window; each row but the last ends with a summary that enters the next prompt."""
    env = env_of(Grid())
    trajectories = SegmentRollouts(units=3, summaries=2).rollout(env, tasks(budget=4))
    split = [trajectory for trajectory in trajectories if len(trajectory.decisions) == 3]
    assert split and len(env.completed) == len(trajectories)
    for trajectory in split:
        rows, conversation = env.batch([trajectory]), trajectory.record
        assert (
            conversation.task.context["kind"] == "summary"
            and not conversation.assisted
            and trajectory.task.context is None
        )
        assert trajectory.metrics["turns"] == 8 and trajectory.metrics["length"] == int(rows.valid().sum())
        starts, tokens = rows.extra["start"].tolist(), rows.extra["tokens"].tolist()
        shown = [env.policy.decode_message(row[1:start]) for row, start in zip(tokens, starts, strict=True)]
        behind = rows.valid() & (rows.require("unit") == rows.require("unit").amax(1, keepdim=True))
        responses = [row[own].tolist() for row, own in zip(rows.extra["chosen"], behind, strict=True)]
        notes = [truncate(env.policy.decode_message(message), env.task.completion_bytes) for message in responses]
        prompt = env.task.episode(int(trajectory.task.payload)).prompt
        assert shown == [prompt, *(f"({note}){prompt}" if note else prompt for note in notes[:2])]
    batch = env.batch(trajectories)
    found = score(env.policy, batch).logp[batch.valid()]
    torch.testing.assert_close(found, batch.logp_old[batch.valid()], atol=1e-4, rtol=1e-4)


class Errand(TextEpisode):
    """Three turns with one reward each."""

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
        return Errand(self.turn_rewards)


def test_branches_keep_earned_rewards_and_given_prefixes_have_none():
    env = env_of(Errands(1.0, 0.25, 0.25))
    first = env.rollout(tasks(1, (5,)))[0]
    branched = env.rollout([env.branch(first, 1)])[0]
    assert branched.reward == 1.5 and return_to_go(branched) == 0.5 and return_to_go(branched, 0.8) == 0.25 + 0.8 * 0.25
    assert unit_reward(env.batch([branched]))[0, 0] == 1.0
    grid = env_of(Grid())
    assert (
        grid.rollout([require_capability(grid, "start_from_solution")(Task(3, payload=3), 0.5)])[0].record.turn_rewards[
            0
        ]
        == 0.0
    )


def test_assisted_rollouts_are_marked_in_the_metrics():
    env = env_of(Calculator())
    hinted = env.rollout([require_capability(env, "hint")(Task(1, payload=1), "solution", 1.0)])[0]
    started = env_of(Grid()).rollout(
        [require_capability(env_of(Grid()), "start_from_solution")(Task(3, payload=3), 0.5)]
    )[0]
    assert hinted.metrics["assisted"] == 1.0 == started.metrics["assisted"]
