"""What the two variants of DSRL share: a frozen base, an actor over its noise, and SAC's actor step in noise space."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from robopolicy.algorithms.frames.soft import SoftConfig, SoftOffPolicy, actor_loss
from robopolicy.constraints import Finite, Positive, Ratio
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace


@dataclass(frozen=True)
class SteeringConfig(SoftConfig):
    """Settings of both variants: the paper's with smaller networks (published: 3 x 2048), for rewards of 1 at success.

    The paper pays -1 until success, so that values are a hundred times larger and a temperature of 1 fits them.
    """

    space: NoiseSpace = field(default_factory=NoiseSpace)  # which noise is steered, and its bound
    actor: GaussianConfig = STEERING_ACTOR  # network that chooses the noise
    critic: CriticConfig = field(default_factory=lambda: CriticConfig(activation="tanh"))
    utd: Ratio = 5.0  # critic steps per decision of one environment (published: 20 per step of 4 environments)
    temperature: Positive = 0.01  # initial weight of the entropy (published: 1)
    backup_entropy: bool = False  # entropy in the critic's target (published: true, false for pi0)
    target_entropy: Finite | None = 0.0  # nats of noise / bound; None is minus the number of free noise dimensions


class Steering(SoftOffPolicy):
    """SAC's actor step on the noise of a frozen base; subclasses say where the values of noise come from."""

    config: SteeringConfig
    policy: LatentPolicy

    def __init__(self, config: SteeringConfig, policy: Policy, *, total_updates: int) -> None:
        """Steer a frozen copy of `policy`, or go on with a policy that is steered already."""
        latent = steer(policy, config, self.name)
        super().__init__(config, latent, total_updates=total_updates)

    @property
    def actor(self) -> GaussianPolicy:
        """The network that chooses the noise."""
        return self.policy.actor

    @property
    def entropy_dims(self) -> int:
        """Those of the free noise."""
        return self.actor.spec.horizon * self.actor.spec.action_dim

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

    def actor_loss(self, batch: Transitions, alpha: Tensor) -> tuple[Tensor, Tensor, Info]:
        """`alpha log pi - min Q(s, w)` at drawn noise w."""
        return *actor_loss(self.actor, self.noise_critic, batch.obs, alpha, self.generator), {}


def steer(policy: Policy, config: SteeringConfig, algorithm: str) -> LatentPolicy:
    """`policy` as a steered one.

    Raises:
        UserError: It takes no noise, the noise is unbounded, or it is steered by another actor or noise space.
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
    theirs, wanted = vars(policy.config.actor), vars(config.actor)
    other = [f"{key}={value}" for key, value in theirs.items() if key != "normalization" and value != wanted[key]]
    if other:  # normalization is the base's
        raise UserError(
            f"The policy is steered by an actor with {', '.join(other)}; set algorithm.actor to that, or start from "
            "its base."
        )
    return policy
