"""Strategies compared with independent rollouts."""

import torch
from secret_env import SecretSequenceEnv

from robopolicy.text.rollouts.strategies import Independent


def same_as_flat(strategy, layout: str, budget: int = 6) -> None:
    """The strategy plays what `Independent` plays, draw for draw (of one task: some play the tasks in waves)."""
    first, second = SecretSequenceEnv(layout, keys=1), SecretSequenceEnv(layout, keys=1)
    ours, flat = strategy.rollout(first, first.tasks(budget)), Independent().rollout(second, second.tasks(budget))
    assert len(ours) == len(flat)
    for mine, other in zip(ours, flat, strict=True):
        assert mine.task.prefix is None and mine.task.context is None and mine.source == other.source
        assert torch.equal(mine.decisions.logp_old, other.decisions.logp_old)
