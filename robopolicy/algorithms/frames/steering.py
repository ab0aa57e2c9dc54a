"""What the two variants of DSRL share: a frozen base, an actor over its noise, and SAC's actor step in noise space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from robopolicy.algorithms.frames.base import Stateful
from robopolicy.algorithms.frames.off_policy import OffPolicy, descend
from robopolicy.algorithms.sac import SACConfig, Temperature, actor_loss
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.transitions import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace


@dataclass(frozen=True)
class SteeringConfig(SACConfig):
    """Settings of both variants: the paper's with smaller networks (published: 3 x 2048), for rewards of 1 at success.

    The paper pays -1 until success, so that values are a hundred times larger and a temperature of 1 fits them.
    """

    space: NoiseSpace = field(default_factory=NoiseSpace)  # which noise is steered, and its bound
    actor: GaussianConfig = STEERING_ACTOR  # network that chooses the noise
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(activation="tanh"))
    utd: float = 5.0  # critic steps per decision of one environment (published: 20 per step of 4 environments)
    temperature: float = 0.01  # initial weight of the entropy (published: 1)
    backup_entropy: bool = False  # entropy in the critic's target (published: true, false for pi0)
    target_entropy: float | None = 0.0  # nats of noise / bound; None is minus the number of free noise dimensions


class Steering(OffPolicy):
    """SAC's actor step on the noise of a frozen base; subclasses say where the values of noise come from."""

    config: SteeringConfig
    policy: LatentPolicy

    def __init__(self, config: SteeringConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy`, or go on with a policy that is steered already."""
        latent = steer(policy, config, self.name)
        super().__init__(config, latent, total_updates=total_updates)
        self.temperature = Temperature(config.temperature)
        inner = latent.actor.spec
        dims = inner.horizon * inner.action_dim
        self.target_entropy = -float(dims) if config.target_entropy is None else config.target_entropy
        groups = [
            {"params": list(latent.actor.parameters()), "lr": config.lr},
            {"params": list(self.temperature.parameters()), "lr": config.temperature_lr},
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)

    @property
    def noise_critic(self) -> QEnsemble:
        """Q(s, w), whose minimum the actor maximises."""
        return self.critic

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The base's own noise within the bound: the success it gives is that of the base in this noise space."""
        return self.policy.sample_prior(obs, generator=generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Noise drawn from the actor, decoded once; the memory keeps it where it is needed."""
        sample = self.policy.sample(obs, generator=generator)
        return replace(sample, record={"noise": sample.record["noise"]})

    def soft(self, batch: Transitions, target: Tensor, logp: Tensor) -> Tensor:
        """`target` `(B,)` with the entropy of the next noise, unless it is left out."""
        return target - batch.discount * self.temperature.value * logp if self.config.backup_entropy else target

    def actor_step(self, batch: Transitions) -> Info:
        """One step of the actor and of the temperature; neither loss has a gradient for the other."""
        alpha = self.temperature.value
        loss, logp = actor_loss(self.policy.actor, self.noise_critic, batch.obs, alpha, self.generator)
        descend(self.optimizer, loss + self.temperature.loss(logp, self.target_entropy))
        return {"loss": loss, "entropy": -logp.mean(), "temperature": alpha}

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts (the policy with its base), the temperature and the optimiser of actor and temperature."""
        return {**super().parts(), "temperature": self.temperature, "optimizer": self.optimizer}


def steer(policy: Policy, config: SteeringConfig, algorithm: str) -> LatentPolicy:
    """`policy` as a steered one.

    Raises:
        UserError: It takes no noise, the noise is unbounded, or it is steered in another noise space already.
    """
    if not config.space.bound:
        raise UserError(
            f"{algorithm} keeps the noise near what the base knows; set algorithm.space.bound, e.g. to 1.5."
        )
    if not isinstance(policy, LatentPolicy):
        return LatentPolicy.steer(policy, config.space, config.actor)
    if policy.config.space != config.space:
        raise UserError(
            f"The policy is steered in {policy.config.space}, not in {config.space}; set algorithm.space to the "
            "former, or start from its base."
        )
    return policy
