"""Selectors: which rows of a batch enter the advantage and the update.

They choose whole trajectories, with all their rows, and never one twice: its rewards would add up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.core.advantages.pipeline import outcome
from robopolicy.core.decisions import Decisions, by_group
from robopolicy.core.segments import Segments
from robopolicy.plugins import Registry

Selector = Callable[[Decisions, torch.Generator | None], Tensor]
"""`(decisions, generator of random choices) -> row indices (M,)`, in their order."""


def mixed(decisions: Decisions, generator: torch.Generator | None) -> Tensor:
    """Groups whose outcomes differ; from the others nothing can be learned (dynamic sampling, DAPO)."""
    reward = outcome(decisions)
    segments = Segments(by_group(decisions), torch.ones_like(reward, dtype=torch.bool))
    return torch.nonzero(segments.spread(segments.differs(reward)).squeeze(1)).squeeze(1)


def successes(decisions: Decisions, generator: torch.Generator | None, *, above: float = 0.0) -> Tensor:
    """Trajectories with an outcome `above` a threshold (rejection sampling)."""
    return torch.nonzero(outcome(decisions).squeeze(1) > above).squeeze(1)


SELECTORS: Registry[Callable[..., object]] = Registry(
    "parts.selector",
    {
        "mixed": mixed,
        "successes": successes,
    },
)
