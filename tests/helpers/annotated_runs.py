"""Runs of text recipes with annotated batches."""

import torch

from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.annotators import AnnotatorEnvs
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import SingleTurn, TextTask
from robopolicy.text.text_env import TextEnv
from robopolicy.training.text_rollout_source import TextRolloutSource


class Scale(TextTask):
    """The reward is the number of bytes of the answer; the solution is `ab`."""

    name = "text/scale"
    prompt_bytes, completion_bytes = 16, 4

    def episode(self, seed):
        return SingleTurn(str(seed), lambda completion: float(len(completion)), "ab")


def learner(task, recipe, **settings):
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=160), PolicySpec({"text": (16,)}, 6))
    config = TextRecipeConfig(**{"prompts_per_update": 3, "num_prompts": 6, "recipe": recipe, "lr": 1e-2, **settings})
    algorithm = TextRecipe(config, policy, total_updates=8)
    return algorithm, TextRolloutSource(TextSim(task, SimOptions(num_envs=1)), algorithm, seed=0)


def completed(task, recipe):
    """An algorithm with its source, its annotator environments, and a batch."""
    algorithm, feed = learner(task, recipe, group_size=2)
    rows = feed.next(algorithm)
    generator = torch.Generator().manual_seed(3)
    start = algorithm.reference_policy or algorithm.policy
    return (
        algorithm,
        feed,
        AnnotatorEnvs(*(TextEnv(policy, task, generator) for policy in (algorithm.policy, start))),
        rows,
    )
