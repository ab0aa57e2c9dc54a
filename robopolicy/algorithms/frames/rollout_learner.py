"""What all on-policy control from scratch shares: rollouts become rows with advantages, and statistics follow them.

`actor_critic.py` (several epochs of joint steps) and `momentum.py` (one step along an averaged gradient) build on it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from robopolicy.algorithms.frames.base import Algorithm, Metrics, Observer, Stateful
from robopolicy.algorithms.frames.on_policy import ReturnScale, Rows, explained_variance, flatten, rows_with_advantages
from robopolicy.constraints import Count, Natural, Ranged, Share
from robopolicy.critics.q import borrow_statistics
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Policy


@dataclass(frozen=True)
class RolloutLearnerConfig(Ranged):
    """Settings of every algorithm that learns control from rollouts."""

    decisions: Count = 128  # T, decisions per environment and rollout
    gamma: Share = 0.99  # discount per control step
    lam: Share = 0.95  # GAE lambda
    batch_size: Count = 256  # decisions per minibatch
    normalize_reward: bool = True  # divide rewards by the running standard deviation of the return
    critic: ValueConfig = field(default_factory=ValueConfig)  # value network
    seed: Natural = 0  # order of the minibatches


class RolloutLearner(Algorithm):
    """Learns from one rollout after the other with a value network; subclasses define `learn`."""

    config: RolloutLearnerConfig

    def __init__(self, config: RolloutLearnerConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` rollouts."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        policy.eval()  # no dropout: what was sampled must be scored by the same network
        self.config = config
        self.step_discount = config.gamma
        self.critic = self.make_critic()
        borrow_statistics(self.critic.encoder, policy)
        self.scale = ReturnScale()

    def make_critic(self) -> ValueNet:
        """The value network; an algorithm that values something else builds its own."""
        return ValueNet(self.config.critic, self.policy.spec)

    @abstractmethod
    def learn(self, rows: Rows, shape: tuple[int, int]) -> Metrics:
        """Improve policy and critic from the rows of a rollout of `shape` (T, N)."""

    def observers(self) -> tuple[Observer, ...]:
        """Networks whose running normalisers follow what is played."""
        return self.policy, self.critic

    def rows_of(self, batch: Rollout) -> Rows:
        """The decisions to learn from, with advantages."""
        config = self.config
        return rows_with_advantages(batch, self.critic, gamma=config.gamma, lam=config.lam, scale=self.scale)

    def update(self, batch: Rollout) -> Metrics:
        """Learn from one rollout."""
        if self.config.normalize_reward:
            self.scale.observe(batch, self.config.gamma)
        rows = self.rows_of(batch)
        metrics = self.learn(rows, batch.shape)
        played = flatten(batch.obs)
        for network in self.observers():
            network.observe(played)
        self.updates += 1
        return metrics | {"critic/explained_variance": explained_variance(rows)}

    def parts(self) -> Mapping[str, Stateful]:
        """Networks and the running scale of the rewards."""
        return {"policy": self.policy, "critic": self.critic, "scale": self.scale}
