"""Compares strategies with independent rollouts."""

import torch
from secret_env import SecretSequenceEnv

from robopolicy.text.rollouts.strategies import Independent


def same_as_flat(strategy, layout: str, budget: int = 6) -> None:
    """The strategy samples the same rollouts as `Independent` (of one task, since some strategies interleave tasks)."""
    first, second = SecretSequenceEnv(layout, keys=1), SecretSequenceEnv(layout, keys=1)
    ours, flat = strategy.rollout(first, first.tasks(budget)), Independent().rollout(second, second.tasks(budget))
    assert len(ours) == len(flat)
    for own, other in zip(ours, flat, strict=True):
        assert own.task.prefix is None and own.task.context is None and own.source == other.source
        assert torch.equal(own.decisions.logp_old, other.decisions.logp_old)
