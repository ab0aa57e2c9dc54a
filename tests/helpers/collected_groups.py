"""A collector on the secret-sequence environment, and an update on collected groups."""

import torch
from secret_env import SecretSequenceEnv

from robopolicy.core.recipe import Recipe
from robopolicy.text.rollouts.collector import Collector
from robopolicy.text.rollouts.protocols import PromptPool

GRPO = {
    "title": "grpo",
    "advantage": [
        {
            "name": "baseline",
            "kind": "mean",
            "scope": {"partition": "group", "reduce_over": "trajectory"},
            "singleton": "zero",
        }
    ],
    "estimator": {"surrogate": "policy_gradient"},
}


def collector(env: SecretSequenceEnv, plain=(), size: int = 4) -> Collector:
    count = len(env.secret)
    pool = PromptPool(env.tasks(), category=torch.arange(count) % 2, difficulty=torch.arange(count))
    return Collector(dict(plain), pool, env, group_size=size, seed=1)


def learn(env: SecretSequenceEnv, side: Collector, groups: int = 3) -> list[float]:
    """Run one update of REINFORCE with a baseline and return the collected rewards."""
    recipe = Recipe.from_dict(GRPO)
    batch = side.collect(groups)
    advantage = recipe.advantage(batch.decisions)
    loss, _ = recipe.loss(batch.decisions, advantage, env.scored(batch.trajectories))
    (gradient,) = torch.autograd.grad(loss, env.logits)
    with torch.no_grad():
        env.logits -= 20.0 * gradient
    side.observe(batch, advantage)
    return [trajectory.reward for trajectory in batch.trajectories]
