"""DSRL-SAC: soft actor-critic over the noise of a frozen diffusion or flow policy (S116, Wagenmaker et al. 2025).

The noise is the action: the base policy becomes part of the environment, and plain SAC learns Q(s, w) and pi(w | s) in
the box [-b, b], one decision per chunk. The base is only called, once per chunk played, and never changes.

Use it on a black box, above all on a slow or remote one: updates do not call the base. Not with demonstrations, whose
noise is unknown, and less sample-efficient than `dsrl_na` where the base is quick to call. The base must be
deterministic given its noise, and must sometimes do the right thing: steering selects behaviour, it invents none.

Deviations from the public code: it denoises a second time while playing, here every chunk is decoded exactly once;
truncated episodes bootstrap from their last observation; rewards are discounted per control step (the paper's one
discount per chunk of n steps is gamma ** n); the actor has no LayerNorm; the target leaves the entropy out, see
`dsrl_na`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from robopolicy.algorithms.frames.base import Metrics
from robopolicy.algorithms.frames.steering import Steering, SteeringConfig
from robopolicy.critics.q import QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy


@dataclass(frozen=True)
class DSRLSACConfig(SteeringConfig):
    """Settings of DSRL-SAC."""


class DSRLSAC(Steering):
    """SAC whose actions are noise."""

    name = "dsrl_sac"
    config_class = DSRLSACConfig
    data_source = "replay"
    heads = ("decode",)
    reference = "wagenmaker2025dsrl"
    decisions_only = True  # the noise is known where a chunk was chosen
    config: DSRLSACConfig

    def __init__(self, config: DSRLSACConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy` for `total_updates` updates."""
        if config.n_step % policy.spec.execute:
            raise UserError(
                f"Noise decides {policy.spec.execute} actions at once, so algorithm.n_step must be a multiple of that, "
                f"got {config.n_step}."
            )
        super().__init__(config, policy, total_updates=total_updates)

    def make_critic(self) -> QEnsemble:
        """Q(s, w) on the free noise, divided by its bound."""
        return QEnsemble(self.config.critic, self.policy.actor)

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation."""
        w, logp = self.policy.actor.rsample(batch.next_obs, generator=self.generator)
        return self.soft(batch, self.bootstrap(batch, w), logp)

    def update(self, batch: Transitions) -> Metrics:
        """SAC on the replayed noise in place of the replayed actions."""
        if "noise" not in batch.record:
            raise UserError(
                "DSRL-SAC learns from the noise behind each action, which a dataset does not hold; "
                "use algorithm=dsrl_na with a dataset, or leave dataset= out."
            )
        return super().update(replace(batch, chunk=batch.record["noise"]))
