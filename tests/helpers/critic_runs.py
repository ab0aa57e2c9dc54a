"""Text recipes with a learned critic."""

import torch

from robopolicy.core.decisions import Decisions
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.grid import Grid

SPEC = PolicySpec({"text": (Grid.prompt_bytes,)}, Grid.completion_bytes)


def rows(**fields):
    """Three tokens, a token of the environment between the first two; values 0.5, -, 0.25 and 1."""
    mask = torch.tensor([[True, False, True, True]])
    value = torch.tensor([[0.5, 9.0, 0.25, 1.0]])
    reward = torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    unit = torch.tensor([[0, 1, 1, 1]])
    return Decisions(torch.zeros(1, 4), mask=mask, value=value, reward=reward, unit=unit, **fields)


def learner(recipe, **settings):
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=128), SPEC)
    config = TextRecipeConfig(recipe=recipe, prompts_per_update=8, num_prompts=50, warmup=0, **settings)
    algorithm = TextRecipe(config, policy, total_updates=10)
    return algorithm, TextRolloutSource(TextSim(Grid(), SimOptions(num_envs=1)), algorithm, seed=0)
