"""FPO: flow matching policy gradients (McAllister et al. 2025).

The clipped policy gradient of PPO, with the flow-matching loss l in place of a log-probability. For every chunk N pairs
of noise and time are drawn and kept; the ratio is `exp(mean(l_old - l))` over the pairs, one per chunk. l bounds minus
the log-likelihood from above up to a constant, so raising the ratio of good chunks raises their likelihood. The
sampler may be anything and is never differentiated.

Use it to train or fine-tune a flow, diffusion or EDM policy where the chain's density is not wanted: many sampler
steps, a deterministic sampler. Not for heads with learned step lengths (shortcut, MeanFlow), and rather FPO++ for
fine-tuning: one ratio for all pairs is noisier, and late collapse is reported.

Deviations from the public code: the head's own training loss is used, whatever it predicts (published: velocity
prediction, supervised as noise); chunks average the loss over their executed steps; times follow the head's time law
(published: the grid of the sampler); truncated episodes bootstrap from their last observation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.frames.matching import MatchingConfig, MatchingTuner
from robopolicy.algorithms.frames.on_policy import Rows, normalize
from robopolicy.constraints import Positive
from robopolicy.core.decisions import Decisions
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds
from robopolicy.policies.base import Info, Policy


@dataclass(frozen=True)
class FPOConfig(MatchingConfig):
    """Settings of FPO; clip and pairs are the paper's."""

    clip: Positive = 0.05  # ratio bounds on the mean difference of losses


def fpo_estimator(clip: float) -> Estimator:
    """Clipped surrogate on one ratio per chunk, the geometric mean over its pairs."""
    return Estimator(EstimatorConfig(level="unit", reduction="mean", bounds=ConstantBounds(clip)))


def actor_loss(logp: Tensor, logp_old: Tensor, advantage: Tensor, estimator: Estimator) -> tuple[Tensor, Info]:
    """Surrogate of minus the losses `(B, N)` against the stored ones, for one advantage per chunk `(B,)`."""
    return estimator(Decisions(logp_old), advantage, logp)


class FPO(MatchingTuner):
    """PPO on ratios of flow-matching losses."""

    name = "fpo"
    config_class = FPOConfig
    data_source = "rollout"
    heads = ("flow", "diffusion", "edm")
    reference = "mcallister2025fpo"
    config: FPOConfig

    def __init__(self, config: FPOConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        super().__init__(config, policy, title="FPO", total_updates=total_updates)
        self.estimator = fpo_estimator(config.clip)

    def logp(self, rows: Rows) -> Tensor:
        """Minus the loss `(B, N)` of each pair."""
        return -self.losses(rows)

    def actor_loss(self, rows: Rows) -> tuple[Tensor, Info]:
        """Clipped surrogate; advantages are normalised within the minibatch."""
        return actor_loss(self.logp(rows), rows.logp, normalize(rows.advantage), self.estimator)
