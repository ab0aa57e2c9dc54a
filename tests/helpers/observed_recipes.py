"""Runs of text recipes whose mechanism is observed."""

import torch
from recipe_learners import learner

from benchmarks.text.mechanism import ADVANTAGE, EVERY, Mechanism, ObservedRecipe
from robopolicy.core.recipe import Recipe
from robopolicy.recipe_files import read_recipe
from robopolicy.sim.registry import SimOptions
from robopolicy.text.recipe_trainer import TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.training.text_file_source import recipe_source
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic


def observed_on_one_turn(name: str) -> Mechanism:
    """The advantage of a recipe against GRPO's in two observed updates on sums, with rewards for every third answer."""
    policy = learner(Arithmetic()).policy
    algorithm = ObservedRecipe(TextRecipeConfig(recipe=name, prompts_per_update=8), policy, total_updates=EVERY + 1)
    mechanism = Mechanism(ADVANTAGE, "grpo")
    algorithm.watch(mechanism, Recipe.from_dict(read_recipe("grpo")))
    source = recipe_source(TextSim(Arithmetic(), SimOptions(num_envs=1)), algorithm, 0)
    assert isinstance(source, TextRolloutSource)
    for _ in range(EVERY + 1):
        batch = source.next(algorithm)
        reward = batch.require("reward").clone()
        reward[:, 0] = (torch.arange(len(reward)) % 3 == 0).float()  # an untrained policy has no successes
        algorithm.update(batch.with_fields(reward=reward))
    source.close()
    return mechanism
