"""DSRL-NA: noise-aliased steering of a frozen diffusion or flow policy (S116, Wagenmaker et al. 2025).

Many noises give the same action. So the temporal-difference critic Q_A lives on actions, and is distilled into Q_W on
noise: draw noise w, let the base turn it into a chunk P(s, w), regress Q_W(s, w) on Q_A(s, P(s, w)). The actor
maximises Q_W. Actions suffice, so demonstrations and any other logged data can be replayed (`dataset=FOLDER`).

Use it on a black box that is quick to call, and wherever there is offline data. Not on a slow or remote base: every
critic step and every distillation step calls it on a whole minibatch, while `dsrl_sac` calls it to play only. The base
must be deterministic given its noise, and must sometimes do the right thing: steering selects behaviour, it invents
none.

Deviations from the public code: noise drawn for the distillation is cut to the bound [-b, b] that the actor has, where
the code draws beyond it, and Q_W is thus never asked about noise it has not seen; truncated episodes bootstrap from
their last observation; rewards are discounted per control step; the actor has no LayerNorm. The target leaves the
entropy out, as the authors do for pi0: with a reward of 1 that ends the episode, the entropy of all further decisions
would be lost by succeeding. `backup_entropy=true` and `temperature=1` are the paper's otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.algorithms.frames.base import Metrics, Observer, Stateful
from robopolicy.algorithms.frames.off_policy import descend
from robopolicy.algorithms.frames.steering import Steering, SteeringConfig
from robopolicy.constraints import Ratio
from robopolicy.critics.q import QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Observation, Policy


@dataclass(frozen=True)
class DSRLNAConfig(SteeringConfig):
    """Settings of DSRL-NA."""

    distill: Ratio = 0.5  # distillation steps per critic step, at least one per update (published: 10 per 20)


def distill_loss(
    noise_critic: QEnsemble, critic: QEnsemble, obs: Observation, w: Tensor, chunk: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Regression of Q_W(s, w) on Q_A(s, chunk), member by member; `chunk` `(B, H, A)` is the base's for `w`."""
    with torch.no_grad():
        target = critic(obs, chunk)  # (M, B)
    output = noise_critic.output(noise_critic.encode(obs), w)
    loss = noise_critic.regression(output, target).mean(1).sum()
    error = (noise_critic.value(output.detach()) - target).square().mean()
    return loss, {"distill_loss": loss.detach(), "distill_error": error.sqrt()}


class DSRLNA(Steering):
    """Actor on noise, temporal differences on actions, and a distillation between them."""

    name = "dsrl_na"
    config_class = DSRLNAConfig
    data_source = "replay"
    heads = ("decode",)
    reference = "wagenmaker2025dsrl"
    config: DSRLNAConfig

    def __init__(self, config: DSRLNAConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy` for `total_updates` updates."""
        super().__init__(config, policy, total_updates=total_updates)
        self.critic.eval()  # as a teacher it is read as it stands, without dropout
        self._noise_critic = QEnsemble(config.critic, self.policy.actor)
        self.noise_critic_optimizer = torch.optim.Adam(self._noise_critic.parameters(), lr=config.critic_lr, fused=True)

    @property
    def noise_critic(self) -> QEnsemble:
        """Q_W, which has no target network: its own target does not depend on it."""
        return self._noise_critic

    def target(self, batch: Transitions) -> Tensor:
        """Soft value of the next observation, at the chunk of the actor's noise."""
        w, logp = self.policy.actor.rsample(batch.next_obs, generator=self.generator)
        chunk = self.policy.play(batch.next_obs, w, self.generator)
        return self.soft(batch, self.bootstrap(batch, chunk), logp)

    def update(self, batch: Transitions) -> Metrics:
        """Steps of Q_A and the actor on every minibatch, then distillation on as many of them as asked for."""
        metrics = super().update(batch)
        minibatches = list(batch.split(self.config.batch_size))
        info: dict[str, Tensor] = {}
        for step in range(max(1, round(self.config.distill * len(minibatches)))):
            info = self.distill_step(minibatches[step % len(minibatches)].obs)
        return metrics | {f"critic/{key}": float(value) for key, value in info.items()}

    def observers(self) -> tuple[Observer, ...]:
        """The shared ones and Q_W."""
        return *super().observers(), self._noise_critic.encoder

    def distill_step(self, obs: Observation) -> dict[str, Tensor]:
        """One step of Q_W at freshly drawn noise."""
        reference = next(iter(obs.values()))
        w = self.policy.draw(len(reference), self.generator, reference.device)
        chunk = self.policy.play(obs, w, self.generator)
        loss, info = distill_loss(self._noise_critic, self.critic, obs, w, chunk)
        descend(self.noise_critic_optimizer, loss)
        return info

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts and Q_W with its optimiser."""
        return {
            **super().parts(),
            "noise_critic": self._noise_critic,
            "noise_critic_optimizer": self.noise_critic_optimizer,
        }
