"""A text task as the world of the sampling side: attempts, rows, and what samplers ask of it."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.advantage_sources import unit_reward
from robopolicy.contrib.text_catalogue.annotators import return_to_go
from robopolicy.contrib.text_catalogue.windows import Segments
from robopolicy.core.registry import build
from robopolicy.errors import UserError
from robopolicy.recipe_files import read_recipe
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.rollouts.collector import INTERVENTIONS
from robopolicy.text.rollouts.protocols import TEACHER, Task, able, rewards_of
from robopolicy.text.task import Episode, TextTask, Turn, shortened
from robopolicy.text.text_env import TextWorld, score
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.calculator import Calculator
from robopolicy_tasks.text.grid import Grid


def world_of(task, seed=0):
    torch.manual_seed(seed)
    spec = PolicySpec({"text": (task.prompt_bytes,)}, task.completion_bytes)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=160), spec)
    return TextWorld(policy, task, torch.Generator().manual_seed(seed))


def tasks(budget=3, keys=(5, 6), temperature=1.0):
    return [Task(key, payload=key, budget=budget, temperature=temperature) for key in keys]


def test_abilities():
    world = world_of(Grid())
    for ability in ("hint", "begin", "repair", "rescore", "rewrite", "summarize", "teach"):
        assert callable(able(world, ability))
    with pytest.raises(UserError, match="ability 'inpaint', which TextWorld lacks"):
        able(world, "inpaint")


def test_solutions_are_taught_with_probability_one():
    world = world_of(Grid())
    (taught,) = able(world, "teach")(tasks()[0], 2)  # there is one solution, and the same row twice would weigh double
    assert able(world, "teach")(tasks()[0], 0) == []
    assert taught.success and taught.source == TEACHER
    assert (taught.decisions.logp_old == 0).all()
    assert torch.isfinite(score(world.policy, world.batch([taught])).logp).all()


@pytest.mark.parametrize("task", [Arithmetic(), Grid()], ids=["one turn", "turns"])
def test_a_given_beginning_is_no_decision(task):
    world = world_of(task)
    key = next(key for key in range(50) if len(" ".join(task.episode(key).demonstration())) > 1)
    begun = able(world, "begin")(tasks(1, (key,))[0], 0.7)
    attempt = world.play([begun])[0]
    given = begun.prefix["tokens"]
    assert given and not attempt.decisions.mask[0, : len(given)].any()
    batch = world.batch([attempt])
    torch.testing.assert_close(score(world.policy, batch).logp, batch.logp_old, rtol=0, atol=2e-5)
    whole = able(world, "begin")(tasks()[0], 0.0)
    assert whole.prefix["tokens"] == []


def test_a_hint_changes_what_is_seen_and_rescoring_keeps_both():
    world = world_of(Arithmetic())
    task = tasks(1, (5,))[0]
    hinted = able(world, "hint")(task, "solution", 1.0)
    attempt = world.play([hinted])[0]
    (plain,) = able(world, "rescore")([attempt], [task])
    assert torch.equal(plain.decisions.logp_behaviour, attempt.decisions.logp_old)
    assert not torch.allclose(plain.decisions.logp_old, attempt.decisions.logp_old)
    batch = world.batch([plain])
    torch.testing.assert_close(score(world.policy, batch).logp, batch.logp_old, rtol=0, atol=2e-5)


def test_interventions_of_the_sampling_side_run_on_text():
    world = world_of(Arithmetic())
    task = tasks(4, (5,))[0]
    group = world.play([task] * 4)
    for name in ("hint", "graded_hints", "teacher", "demonstration", "self_correct", "replay", "drop"):
        part = INTERVENTIONS[name]()
        if part.triggered(rewards_of(group)):
            rows = part.rows(group, world)
            if rows:
                batch = world.batch(rows)
                assert torch.isfinite(score(world.policy, batch).logp).all()


def test_scaffolds_tell_ever_more_of_the_solution(monkeypatch):
    world, (task,) = world_of(Grid()), tasks(1, (10,))
    told = []
    plain = able(world, "hint")
    monkeypatch.setattr(world, "hint", lambda *asked: told.append(plain(*asked)) or told[-1], raising=False)
    (entry,) = read_recipe("scaf_grpo")["rollout"]["intervention"]
    build("intervention", entry).rows(world.play([task] * 2), world)
    solution = " ".join(Grid().episode(10).demonstration())
    texts = [hint.context["text"] for hint in told]
    assert texts == [solution[: round(share * len(solution))] for share in (0.25, 0.5, 0.75, 1.0)]
    assert len(set(texts)) == 4


def test_restated_problems_have_the_same_answer():
    world, arithmetic = world_of(Arithmetic()), Arithmetic()
    for seed in range(12):
        problem = arithmetic.episode(seed)
        for how in ("varied", "simpler"):
            again = able(world, "rewrite")(Task(seed, payload=seed, prefix={}), how)
            other = arithmetic.episode(again.payload)
            assert other.demonstration() == problem.demonstration() and again.prefix is None
            if again.key != seed:
                assert set(other.prompt[:-1].split("+")) != set(problem.prompt[:-1].split("+"))
                assert how == "varied" or arithmetic.difficulty(again.payload) < arithmetic.difficulty(seed)
    with pytest.raises(UserError, match="text/grid cannot restate"):
        able(world_of(Grid()), "rewrite")(Task(3, payload=3), "simpler")


def test_windows_go_on_from_summaries():
    """SUPO: a row per window, of which all but the last end with a note; the next one sees it in place of the past."""
    world = world_of(Grid())
    attempts = Segments(units=3, summaries=2).rollout(world, tasks(budget=4))
    told = [attempt for attempt in attempts if len(attempt.decisions) == 3]
    assert told and len(world.played) == len(attempts)
    for attempt in told:
        rows, talk = world.batch([attempt]), attempt.record
        assert talk.task.context["kind"] == "summary" and not talk.helped and attempt.task.context is None
        assert attempt.metrics["turns"] == 8 and attempt.metrics["length"] == int(rows.valid().sum())
        starts, tokens = rows.extra["start"].tolist(), rows.extra["tokens"].tolist()
        shown = [world.policy.read(row[1:start]) for row, start in zip(tokens, starts, strict=True)]
        behind = rows.valid() & (rows.require("unit") == rows.require("unit").amax(1, keepdim=True))
        said = [row[own].tolist() for row, own in zip(rows.extra["chosen"], behind, strict=True)]
        notes = [shortened(world.policy.read(message), world.task.completion_bytes) for message in said]
        prompt = world.task.episode(int(attempt.task.payload)).prompt
        assert shown == [prompt, *(f"({note}){prompt}" if note else prompt for note in notes[:2])]
    batch = world.batch(attempts)
    found = score(world.policy, batch).logp[batch.valid()]
    torch.testing.assert_close(found, batch.logp_old[batch.valid()], atol=1e-4, rtol=1e-4)


class Errand(Episode):
    """Three turns, of which each earns something."""

    prompt = "go"

    def __init__(self, paid):
        self.paid, self.turn = paid, 0

    def step(self, completion):
        self.turn += 1
        return Turn(self.paid[self.turn - 1], success=True, done=self.turn == len(self.paid), reply="on")


class Errands(TextTask):
    """The same errand for all seeds."""

    name, prompt_bytes, completion_bytes, max_turns = "text/errands", 48, 4, 3

    def __init__(self, *paid):
        self.paid = paid

    def episode(self, seed):
        return Errand(self.paid)


def test_a_branch_keeps_what_was_earned_and_a_given_beginning_earns_nothing():
    world = world_of(Errands(1.0, 0.25, 0.25))
    first = world.play(tasks(1, (5,)))[0]
    branched = world.play([world.branch(first, 1)])[0]
    assert branched.reward == 1.5 and return_to_go(branched) == 0.5 and return_to_go(branched, 0.8) == 0.25 + 0.8 * 0.25
    assert unit_reward(world.batch([branched]))[0, 0] == 1.0
    grid = world_of(Grid())
    assert grid.play([able(grid, "begin")(Task(3, payload=3), 0.5)])[0].record.paid[0] == 0.0


def test_help_is_measured():
    world = world_of(Calculator())
    told = world.play([able(world, "hint")(Task(1, payload=1), "solution", 1.0)])[0]
    begun = world_of(Grid()).play([able(world_of(Grid()), "begin")(Task(3, payload=3), 0.5)])[0]
    assert told.metrics["helped"] == 1.0 == begun.metrics["helped"]
