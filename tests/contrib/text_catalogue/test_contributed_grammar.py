"""Tests of messages under a grammar: allowed tokens, generation, scoring and learning."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.grammar import Grammar
from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.sim import TextSim
from robopolicy.text.task import SingleTurn, TextTask
from robopolicy.text.text_env import TextEnv, score
from robopolicy.text.tokenizers import ByteTokenizer
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.commands import parse
from robopolicy_tasks.text.countdown import Countdown, value_of
from robopolicy_tasks.text.grid import MOVES, Grid
from robopolicy_tasks.text.panda import Panda, PandaTurns


class Formless(TextTask):
    """Task without a response pattern."""

    name = "text/formless"
    prompt_bytes, completion_bytes = 8, 4

    def episode(self, seed):
        return SingleTurn(str(seed), lambda completion: float(len(completion)))


def untrained(budget=6):
    torch.manual_seed(0)
    return TextPolicy(TextConfig(width=16, layers=1, heads=2, context=160), PolicySpec({"text": (16,)}, budget))


def learner(task, recipe="shioenv", **settings):
    config = TextRecipeConfig(**{"prompts_per_update": 3, "num_prompts": 6, "recipe": recipe, "lr": 1e-2, **settings})
    algorithm = TextRecipe(config, untrained(task.completion_bytes), total_updates=8)
    return algorithm, TextRolloutSource(TextSim(task, SimOptions(num_envs=1)), algorithm, seed=0)


def letters(support):
    """Allowed bytes, with a dot for the end token."""
    found = support.nonzero().flatten().tolist()
    return "".join(chr(token) for token in found if token < 256) + ("." if ByteTokenizer.eos in found else "")


def test_a_grammar_allows_the_valid_next_tokens():
    grammar = Grammar(r"\d[-+*]\d", ByteTokenizer())
    assert letters(grammar.allowed("")) == "0123456789"
    assert letters(grammar.allowed("3")) == "*+-"
    assert letters(grammar.allowed("3*")) == "0123456789"
    assert letters(grammar.allowed("3*4")) == "."
    assert letters(grammar.allowed("x")) == "."  # an invalid prefix can only end
    numbers = Grammar(r"\d{1,2}", ByteTokenizer())
    assert letters(numbers.allowed("7")) == "0123456789." and letters(numbers.allowed("42")) == "."
    with pytest.raises(UserError, match="not a regular expression"):
        Grammar("(", ByteTokenizer())


@pytest.mark.parametrize("task", [Arithmetic(), Countdown(), Grid()])
def test_an_untrained_policy_generates_only_well_formed_messages(task):
    policy = untrained(task.completion_bytes)
    limits = {"allowed": Grammar(task.response_pattern, policy.tokenizer).allowed}
    env = TextEnv(policy, task, torch.Generator().manual_seed(0), limits=limits)
    trajectories = env.rollout([Task(key, payload=key) for key in range(16)])
    responses = [message for trajectory in trajectories for message in trajectory.record.responses]
    well_formed = {"text/arithmetic": str.isdigit, "text/countdown": value_of, "text/grid": MOVES.__contains__}[
        task.name
    ]
    assert len(responses) >= 16 and all(well_formed(message) for message in responses)
    rows = env.batch(trajectories)
    out, recorded = score(policy, rows), rows.require("entropy")
    valid = rows.valid()
    torch.testing.assert_close(out.logp[valid], rows.logp_old[valid], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.entropy[valid], recorded[valid], rtol=1e-4, atol=1e-5)
    plain = score(policy, rows.with_fields(extra={k: v for k, v in rows.extra.items() if k != "support"}))
    assert bool((plain.logp[valid] <= out.logp[valid] + 1e-5).all())


def test_a_prefilled_message_continues_in_the_grammar():
    policy = untrained(6)
    prompt = policy.tokenizer.prompt(["1 2 3 6:"])
    grammar = Grammar(Countdown.response_pattern, policy.tokenizer)
    made = policy.generate([prompt + policy.tokenizer.encode("1+")] * 8, allowed=grammar.allowed, prefill=["1+"] * 8)
    assert all(value_of("1+" + policy.decode_message(tokens)) for tokens in made.completions())


def test_a_grammar_recipe_trains_and_tasks_without_a_pattern_are_refused():
    algorithm, feed = learner(Arithmetic(), group_size=4)
    for _ in range(2):
        rows = feed.next(algorithm)
        assert rows.extra["support"].shape == (*rows.shape, algorithm.policy.vocabulary)
        algorithm.update(rows)
    assert feed.metrics()["rollout/format"] == 1.0
    with pytest.raises(UserError, match=r"task text/formless has none"):
        learner(Formless())


def test_generated_robot_programs_parse():
    policy = untrained(48)
    grammar = Grammar(Panda.response_pattern, policy.tokenizer)
    prompts = [policy.tokenizer.prompt(["put the cube on the pad:"])] * 12
    made = policy.generate(prompts, torch.Generator().manual_seed(0), allowed=grammar.allowed)
    whole = [
        policy.decode_message(tokens)
        for tokens, truncated in zip(made.completions(), made.truncated.tolist(), strict=True)
        if not truncated
    ]
    assert len(whole) > 2 and all(parse(program) for program in whole)
    assert Grammar(PandaTurns.response_pattern, policy.tokenizer).allowed("carry pad").sum() == 2  # the end or a blank
