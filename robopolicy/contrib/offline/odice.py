"""ODICE: V of a dual problem by an orthogonal gradient, and weighted imitation (Mao et al. 2024).

Distribution correction estimation computes how often the best policy near the data visits each of its pairs. The
solution is `max(delta, 0)` of the residual `delta = r + gamma V(s') - V(s)` (Pearson's chi-squared), and V minimises
`(1 - lambda) V(s) + lambda f*(delta)`. Its gradient through V(s) constrains actions and the one through V(s') states,
but where the two conflict the second cancels the first. ODICE projects the second onto the orthogonal complement of the
first. The policy imitates with these weights, with any head.

Use it for offline data of mixed quality in place of iql: it needs no Q, takes no action outside the data, and keeps the
policy away from states without data. With `largest_return=0` and `conservatism=0.4` it ignores rewards and imitates the
data of an expert. It cannot exceed the data, and luck in the dynamics counts as advantage.

Deviations from the public code: rewards are scaled so that the largest discounted return of the dataset's episodes is
`largest_return` (the code: undiscounted ones of locomotion span 1000, about the same at gamma .99), because the scale
determines how many residuals are positive; the policy learns from V after its step; chunks replace single actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, make_adam, optimizer_step
from robopolicy.algorithms.common.offline import ImitationConfig, imitation_loss, require_imitation
from robopolicy.constraints import NonNegative, OpenFraction, Positive
from robopolicy.core.gradients import flat_gradient
from robopolicy.critics.q import CriticConfig, CriticInput, QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.data.episodes import Array, Episodes
from robopolicy.errors import UserError
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.noise import Randomness

SMALLEST = 1e-10  # squared norm of a gradient below which its direction is undefined


@dataclass(frozen=True)
class ODICEConfig(ImitationConfig):
    """Settings of ODICE; defaults are the public code's for offline RL."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=True)
    )
    lr: Positive = 2e-4  # learning rate of the policy
    critic_lr: Positive = 2e-4  # learning rate of V
    conservatism: OpenFraction = 0.6  # lambda: towards 1 fewer, better pairs are imitated
    eta: NonNegative = 1.0  # weight of the gradient through the next state; 0 is the semi-gradient
    largest_return: NonNegative = 100.0  # largest return of the dataset after scaling; 0 ignores rewards (imitation)
    weight_max: Positive = 100.0  # bound on the weights
    weight_decay: NonNegative = 1e-4  # of the policy

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.largest_return and self.conservatism >= 0.5:
            raise UserError(
                f"Without rewards every weight is 0 from conservatism=0.5 upwards, got {self.conservatism:g}; "
                "set algorithm.conservatism=0.4."
            )
        if self.critic.bins:
            raise UserError("V of ODICE has no regression target for a histogram; set algorithm.critic.bins=0.")


def chi_square_conjugate(residual: Tensor) -> Tensor:
    """`f*(x) = x w - (w - 1)^2` with `w = max(x / 2 + 1, 0)`, which is also its derivative."""
    weight = (residual / 2 + 1).clamp(min=0)
    return residual * weight - (weight - 1).square()


def visit_weight(residual: Tensor, largest: float) -> Tensor:
    """Imitation weight `max(residual, 0)`, at most `largest`."""
    return residual.clamp(0, largest)


def parallel_share(gradient: Tensor, along: Tensor) -> Tensor:
    """Coefficient of `along` `(P,)` in `gradient` `(P,)`: `<g, a> / |a|^2`, negative where they conflict."""
    return gradient @ along / (along @ along).clamp(min=SMALLEST)


def orthogonal_sum(kept: Tensor, added: Tensor, parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """A loss with the whole gradient of `kept`, plus the part of the gradient of `added` that is orthogonal to it.

    With `c = <g_a, g_k> / |g_k|^2` the gradient of `(1 - c) kept + added` is `g_k + (g_a - c g_k)`: a small step lowers
    `kept` by as much as without `added`.

    Args:
        kept: Scalar loss.
        added: Scalar loss.
        parameters: Parameters of both gradients.

    Returns:
        The loss, and c.
    """
    learned = list(parameters)
    share = parallel_share(flat_gradient(added, learned), flat_gradient(kept, learned)).detach()
    return (1 - share) * kept + added, share


class StateValues(QEnsemble):
    """V_m(s), m = 1..M: an ensemble without action input."""

    def __init__(self, config: CriticConfig, policy: CriticInput) -> None:
        super().__init__(config, policy, steps=0)

    def values(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Values `(M, B)`."""
        return self.value(self.body(self.encode(obs)))


class ODICE(OffPolicy):
    """Offline V by orthogonal gradients, with weighted imitation."""

    name = "odice"
    config_class = ODICEConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "mao2024odice"
    uses_full_ensemble = True
    needs_dataset: ClassVar[bool] = True
    config: ODICEConfig
    critic: StateValues
    target_critic: StateValues

    def __init__(self, config: ODICEConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` by weighted imitation."""
        policy = require_imitation(policy, self.name)
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic_optimizer = make_adam(self.critic, config.critic_lr)  # no weight decay of V
        self.optimizer = torch.optim.Adam(
            policy.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
        self.reward_scale = 1.0 if config.largest_return else 0.0  # until the dataset is attached

    def make_critic(self) -> StateValues:
        """Build twin V networks."""
        return StateValues(self.config.critic, self.policy)

    def attach_dataset(self, episodes: Episodes) -> None:
        """Scale rewards by the largest return of an episode.

        Raises:
            UserError: All returns are 0.
        """
        if not self.config.largest_return:
            return
        largest = float(np.abs(discounted_returns(episodes, self.config.gamma)).max())
        if not largest:
            raise UserError(
                f"All {episodes.num_episodes} episodes of the dataset have return 0; to imitate them all set "
                "algorithm.largest_return=0 algorithm.conservatism=0.4, or add other data."
            )
        self.reward_scale = self.config.largest_return / largest

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of the policy."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """Scaled reward plus the lesser target V of the next observation."""
        return self.reward_scale * batch.reward + batch.discount * self.target_critic.values(batch.next_obs).amin(0)

    def residual_losses(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of the residual through V(s) and through V(s'), and the forward residual `(M, B)`."""
        with torch.no_grad():
            target, slow = self.target(batch), self.target_critic.values(batch.obs).amin(0)
        forward = target - self.critic.values(batch.obs)
        backward = self.reward_scale * batch.reward + batch.discount * self.critic.values(batch.next_obs) - slow
        kept, added = ((chi_square_conjugate(x) * batch.weight).mean() for x in (forward, backward))
        return self.config.conservatism * kept, self.config.conservatism * self.config.eta * added, forward

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Loss with the orthogonal gradient."""
        kept, added, residual = self.residual_losses(batch)
        dual, share = orthogonal_sum(kept, added, self.critic.parameters())
        value = self.critic.values(batch.obs)
        loss = dual + (1 - self.config.conservatism) * (value * batch.weight).mean()
        residual = residual.detach()
        return loss, {
            "value": value.detach().mean(),
            "residual": residual.mean(),
            "parallel_share": share,
            "td_errors": residual.abs().mean(0),
        }

    @torch.no_grad()
    def weights(self, batch: Transitions) -> Tensor:
        """Imitation weights `(B,)` of the batch's chunks, averaged over the twins."""
        with evaluation_mode(self.critic):
            residual = self.target(batch) - self.critic.values(batch.obs)
        return visit_weight(residual, self.config.weight_max).mean(0)

    def update(self, batch: Transitions) -> Metrics:
        """Take steps of V on consecutive minibatches, with weighted imitation in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                weight = self.weights(part)
                loss = imitation_loss(
                    self.policy,
                    part.obs,
                    part.chunk,
                    weight,
                    mask=part.mask,
                    generator=self.generator,
                    progress=self.progress,
                ).mean()
                optimizer_step(self.optimizer, loss, self.policy, self.config.grad_clip)
                stats.actor(loss=loss, weight=weight.mean(), imitated=(weight > 0).float().mean())
        return self.finish(batch, stats)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The shared items and the optimiser of the policy."""
        return {**super().checkpoint_items(), "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        """States of all items and the scale of the rewards."""
        return {**super().state_dict(), "reward_scale": self.reward_scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.reward_scale = float(state["reward_scale"])


def discounted_returns(episodes: Episodes, gamma: float) -> Array:
    """Discounted return `(E,)` of each episode from its start, per control step.

    Raises:
        UserError: The dataset has no rewards.
    """
    if "reward" not in episodes.arrays:
        raise UserError("The dataset has no 'reward', which value learning needs; collect it again with rewards.")
    age = np.arange(len(episodes)) - np.repeat(episodes.starts, episodes.lengths)
    return np.add.reduceat(episodes.arrays["reward"].astype(np.float64) * gamma**age, episodes.starts)
