"""Builders of decisions of agents over several steps."""

import torch

from robopolicy.core.decisions import Decisions


def steps(reward: list[list[float]], observation: list[list[int]], group: list[int], **extra: list[list[int]]):
    """Rollouts of one row, one decision per unit."""
    values = torch.tensor(reward, dtype=torch.float64)
    named = {"observation": observation, **extra}
    return Decisions(
        torch.zeros_like(values),
        reward=values,
        unit=torch.arange(values.shape[1]).expand_as(values),
        group=torch.tensor(group),
        extra={name: torch.tensor(value) for name, value in named.items()},
    )
