"""Objectives that see whole groups at once: pairs of trajectories, sets against sets.

All are called `(decisions, advantage (N, 1 or T), logp (N, T)) -> (loss, detached scalars)`; a minibatch holds whole
groups. What they compare is the advantage of each trajectory, by default its outcome. A preference pair is a group of
two, of which the chosen one has the higher reward. Trajectories of one row, or of several that share it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.objectives.geometric import GeometricMean
from robopolicy.core.objectives.pairs import DirectPreference
from robopolicy.core.objectives.sets import KahnemanTversky
from robopolicy.plugins import Registry

Objective = Callable[[Decisions, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

OBJECTIVES: Registry[Callable[..., object]] = Registry(
    "parts.objective",
    {
        "direct_preference": DirectPreference,
        "geometric_mean": GeometricMean,
        "kahneman_tversky": KahnemanTversky,
    },
)
