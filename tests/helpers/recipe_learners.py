"""Learners with small text recipes on a text task."""

import torch

from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig


def learner(task, **settings):
    torch.manual_seed(0)
    spec = PolicySpec({"text": (task.prompt_bytes,)}, task.completion_bytes)
    policy = TextPolicy(
        TextConfig(width=16, layers=1, heads=2, context=128, dtype=settings.pop("dtype", "float32")), spec
    )
    config = TextRecipeConfig(prompts_per_update=8, num_prompts=50, warmup=0, **settings)
    return TextRecipe(config, policy, total_updates=10)
