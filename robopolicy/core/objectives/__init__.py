"""Objectives that see whole groups at once: pairs of trajectories, sets against sets.

All are called `(decisions, advantage (N, 1 or T), logp (N, T)) -> (loss, detached scalars)`; a minibatch holds whole
groups. What they compare is the advantage of each trajectory, by default its outcome. A preference pair is a group of
two, of which the chosen one has the higher reward. Trajectories of one row, or of several that share it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.objectives.embeddings import EmbeddingTriplet
from robopolicy.core.objectives.geometric import GeometricMean
from robopolicy.core.objectives.imitation import DivergenceImitation
from robopolicy.core.objectives.pairs import AnchoredPair, Contrastive, DirectPreference, NashPair, SoftPair
from robopolicy.core.objectives.regression import PairRegression, StepRegression
from robopolicy.core.objectives.sets import Discriminative, KahnemanTversky, SetPreference
from robopolicy.core.objectives.taught import Repeated, Taught
from robopolicy.plugins import Registry

Objective = Callable[[Decisions, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]

OBJECTIVES: Registry[Callable[..., object]] = Registry(
    "parts.objective",
    {
        "anchored_pair": AnchoredPair,
        "contrastive": Contrastive,
        "direct_preference": DirectPreference,
        "discriminative": Discriminative,
        "divergence_imitation": DivergenceImitation,
        "embedding_triplet": EmbeddingTriplet,
        "geometric_mean": GeometricMean,
        "kahneman_tversky": KahnemanTversky,
        "nash_pair": NashPair,
        "pair_regression": PairRegression,
        "repeated": Repeated,
        "set_preference": SetPreference,
        "soft_pair": SoftPair,
        "step_regression": StepRegression,
        "taught": Taught,
    },
)
