"""N-PG-IGT: normalised policy gradient with implicit gradient transport (Fatkhullin et al. 2023).

Momentum averages gradients of past policies, which are biased at the present one. Transport evaluates each new gradient
not at the present weights but beyond them, just so far that the average is the gradient at the present weights, exactly
where the objective is quadratic. The policy that plays is therefore an extrapolation of the one that is learned.

Use it where episodes are few and each gets one gradient step, e.g. on hardware. With many environments and cheap steps
PPO learns faster from the same data.

Deviations from the public code: advantages are GAE on a learned value and are normalised (there: returns and a linear
baseline), and a rollout is a fixed number of decisions of every environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.contrib.control.momentum import MomentumConfig, MomentumGradient, MomentumState


@dataclass(frozen=True)
class NPGIGTConfig(MomentumConfig):
    """Settings of N-PG-IGT; its schedules are the public code's."""


def look_ahead(trace: MomentumState, share: float) -> Tensor:
    """`w + (1 - eta) / eta (w - w_before)` `(P,)`: where the next gradient is to be taken."""
    return trace.weights + (1 - share) / share * (trace.weights - trace.previous)


class NPGIGT(MomentumGradient):
    """Averages gradients that are taken ahead of the weights."""

    name = "npg_igt"
    config_class = NPGIGTConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "fatkhullin2023fisher"
    config: NPGIGTConfig

    def averaged(self, rows: RolloutBatch, shape: tuple[int, int]) -> Tensor:
        """`(1 - eta) d + eta g`, g where the rollout was played."""
        return self.trace.direction.lerp(self.gradient(rows), self.share)

    def sampling_weights(self) -> Tensor:
        """Beyond the learned weights."""
        return look_ahead(self.trace, self.share)
