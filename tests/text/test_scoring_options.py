"""Tests of the `rollout` keys: the learner reads every key that a recipe sets."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.core.recipe import DEFAULTS as OF_RECIPES
from robopolicy.errors import UserError
from robopolicy.recipe_files import read_recipe, recipe_names
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.rollouts.collector import DEFAULTS
from robopolicy.text.scoring_options import SCORING_OPTIONS, scoring_options
from robopolicy.text.sim import TextSim
from robopolicy.text.text_env import score
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.text_file_source import recipe_source
from robopolicy.training.text_rollout_source import AsyncTextRolloutSource, TextRolloutSource
from robopolicy_tasks.text.grid import Grid

SPEC = PolicySpec({"text": (Grid.prompt_bytes,)}, Grid.completion_bytes)
UNREAD: dict[str, str] = {}  # key of rollout -> reason for a recipe to set it although no code reads it


def policy(seed=0, width=16):
    torch.manual_seed(seed)
    return TextPolicy(TextConfig(width=width, layers=2, heads=2, context=128), SPEC)


def learner(recipe, start=None, **settings):
    config = TextRecipeConfig(recipe=recipe, prompts_per_update=4, num_prompts=50, warmup=0, **settings)
    algorithm = TextRecipe(config, start or policy(), total_updates=10)
    return algorithm, TextSim(Grid(), SimOptions(num_envs=1))


def test_the_page_of_recipes_lists_the_keys_of_rollout():
    page = (Path(__file__).parents[2] / "docs" / "text" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (`.*?) \|", page.split("## Rollouts of a recipe")[1].split("\n\n## ")[0])
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == {*DEFAULTS, *SCORING_OPTIONS}


def test_every_key_that_a_recipe_sets_is_read():
    for name in recipe_names():
        plain = read_recipe(name)
        assert set(plain) <= set(OF_RECIPES), name
        unread = set(plain.get("rollout", {})) - set(DEFAULTS) - set(SCORING_OPTIONS) - set(UNREAD)
        assert not unread, f"Nothing reads {sorted(unread)} of the rollout of {name}; read it, drop it, or say why."
    used = {key for name in recipe_names() for key in read_recipe(name).get("rollout", {})}
    assert set(SCORING_OPTIONS) <= used and set(UNREAD) <= used


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"score_with": 3}, "rollout.score_with must be a mapping, got 3"),
        ({"score_with": {"a": 5}}, "'a' in rollout.score_with must be a text, got 5"),
        ({"score_with": {"a": "b"}}, "Values of rollout.score_with must be teacher, got b"),
    ],
)
def test_invalid_values_are_refused(rollout, message):
    with pytest.raises(ValueError, match=message):
        scoring_options(rollout)


@pytest.fixture
def other(tmp_path) -> Path:
    obs = {"text": torch.zeros(1, 1, Grid.prompt_bytes, dtype=torch.uint8)}
    save_checkpoint(tmp_path / "other", policy(seed=1), task="text/grid", obs_sample=obs)
    return tmp_path / "other"


def test_teacher_log_probabilities_are_computed_on_policy_rollouts(other):
    algorithm, sim = learner("kdrl", group_size=2, teacher=str(other))
    batch = recipe_source(sim, algorithm, 0).next(algorithm)
    found = algorithm._preprocess(batch).extra["logp_teacher"]
    assert torch.equal(found, score(policy(seed=1), batch).logp)
    assert "actor/kl_to" in algorithm.update(batch)


def test_a_teacher_that_cannot_score_the_tokens_of_the_policy_is_refused(folder):
    hub, chat = (TextPolicy(TextConfig(pretrained=str(folder), template=name), SPEC) for name in ("plain", "chat"))
    smaller: Any = policy()
    short: Any = policy()
    ended: Any = TextPolicy(TextConfig(pretrained=str(folder)), SPEC)
    smaller.model.resize_token_embeddings(250)
    short.model.config.max_position_embeddings = 64
    ended.tokenizer.eos += 1
    cases = [
        (policy(), hub, "it has another tokenizer; choose another"),
        (hub, ended, "it has another tokenizer; choose another"),
        (hub, chat, "it has template=chat, not plain"),
        (policy(), smaller, "it has 250 tokens, fewer than the 259 of the policy"),
        (policy(), short, "a context of 64 tokens, but conversations of this task have up to 100; choose"),
    ]
    for student, teacher, message in cases:
        algorithm, _ = learner("kdrl", start=student)
        with pytest.raises(UserError, match=f"algorithm.teacher .*{message}"):
            algorithm.set_teacher(teacher)
    learner("kdrl", start=hub)[0].set_teacher(TextPolicy(TextConfig(pretrained=str(folder)), SPEC))


def test_a_teacher_may_have_more_tokens_and_its_context_is_checked_with_every_batch():
    algorithm, sim = learner("kdrl", group_size=2)
    teacher: Any = policy(seed=1)
    teacher.model.resize_token_embeddings(264)
    algorithm.set_teacher(teacher)
    batch = recipe_source(sim, algorithm, 0).next(algorithm)
    assert "actor/kl_to" in algorithm.update(batch)
    teacher.model.config.max_position_embeddings = 8
    with pytest.raises(UserError, match=r"algorithm\.teacher has a context of 8 tokens"):
        algorithm.update(batch)


def test_staleness_selects_the_asynchronous_source():
    for settings, kind in (({}, TextRolloutSource), ({"staleness": 1}, AsyncTextRolloutSource)):
        algorithm, sim = learner("grpo", group_size=2, **settings)
        source = recipe_source(sim, algorithm, 0)
        assert type(source) is kind
        source.close()


def test_missing_teacher_is_refused(other, tmp_path):
    algorithm, sim = learner("kdrl")
    with pytest.raises(UserError, match=r"requires a teacher; set algorithm\.teacher=CHECKPOINT"):
        recipe_source(sim, algorithm, 0)
