"""N-PG-IGT: normalised policy gradient with implicit gradient transport (Fatkhullin et al. 2023).

Momentum averages gradients of past policies, which are biased at the current one. Transport evaluates each new gradient
at extrapolated weights, chosen so that the average is the gradient at the current weights (exactly, for a quadratic
objective). The acting policy is therefore an extrapolation of the learned policy.

Use it where episodes are few and each gets one gradient step, e.g. on hardware. With many environments and cheap steps
PPO takes many gradient steps per rollout.

Deviations from the public code: advantages are GAE on a learned value and are normalised (the code: returns and a
linear baseline), and a rollout is a fixed number of decisions of every environment.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.contrib.control.momentum import MomentumConfig, MomentumGradient, MomentumState


@dataclass(frozen=True)
class NPGIGTConfig(MomentumConfig):
    """Settings of N-PG-IGT; the schedules are the public code's."""


def look_ahead(trace: MomentumState, share: float) -> Tensor:
    """`w + (1 - eta) / eta (w - w_before)` `(P,)`: weights at which the next gradient is computed."""
    return trace.weights + (1 - share) / share * (trace.weights - trace.previous)


class NPGIGT(MomentumGradient):
    """Policy gradient with implicit gradient transport."""

    name = "npg_igt"
    config_class = NPGIGTConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "fatkhullin2023fisher"
    config: NPGIGTConfig

    def averaged(self, rows: RolloutBatch, shape: tuple[int, int]) -> Tensor:
        """`(1 - eta) d + eta g`, with g the gradient at the weights of the rollout."""
        return self.trace.direction.lerp(self.gradient(rows), self.share)

    def sampling_weights(self) -> Tensor:
        """Extrapolate the learned weights."""
        return look_ahead(self.trace, self.share)
