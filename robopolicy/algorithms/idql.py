"""IDQL: the critics of IQL, plain imitation by a generative policy, and best-of-N acting (Hansen-Estruch et al. 2023).

The policy only has to model what the data does, which is what diffusion and flow heads are good at; all improvement
happens when acting, where the critic picks the best of N samples. Critic and policy never influence each other's
training, so either can be replaced.

Use it on offline data with an expressive policy, before trying anything that changes the policy by the critic. Not for
tight control budgets, as every decision costs N samples, nor where the data never contains a good action.

Deviations from the public code: the candidate is chosen by the ensemble mean or minimum of the target critics (there:
the minimum of two), a softmax over Q stands in for the weights that follow from V, and chunks replace single actions;
the policy learns with Adam at a constant rate, its gradient cut at norm 1 (there: AdamW and a cosine over two million
steps).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from robopolicy.algorithms.frames.base import Observer, Stateful
from robopolicy.algorithms.frames.offline_critic import ImplicitConfig, ImplicitRule, OfflineCritic, OfflineCriticConfig
from robopolicy.constraints import Count, Positive, Share
from robopolicy.critics.q import CriticConfig
from robopolicy.data.batches import Transitions
from robopolicy.nets.module_state import EMA
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.wrappers.best_of_n import select


@dataclass(frozen=True)
class IDQLConfig(OfflineCriticConfig):
    """Settings of IDQL; defaults are the public code's unless noted."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256), activation="relu", layer_norm=False)
    )
    implicit: ImplicitConfig = field(default_factory=ImplicitConfig)  # V and its expectile
    candidates: Count = 64  # N, samples per decision
    selection: str = "argmax"  # argmax | softmax
    temperature: Positive = 1.0  # of the softmax, in units of Q
    reduction: str = "min"  # mean | min of the ensemble that chooses
    ema_decay: Share = 0.999  # largest weight of the old average of the policy, which acts and is saved


class IDQL(OfflineCritic):
    """Expectile critics, imitation, best-of-N."""

    name = "idql"
    config_class = IDQLConfig
    data_source = "replay"
    heads = ("imitation_loss",)
    reference = "hansenestruch2023idql"
    config: IDQLConfig
    rule: ImplicitRule

    def __init__(self, config: IDQLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` and to act with the best of its averaged weights' samples."""
        super().__init__(config, policy, total_updates=total_updates)
        self.ema = EMA(self.policy, config.ema_decay)
        self.player = select(
            self.ema.module,
            self.target_critic,
            candidates=config.candidates,
            selection=config.selection,
            temperature=config.temperature,
            reduction=config.reduction,
        )

    def make_rule(self) -> ImplicitRule:
        """V by expectile regression."""
        return ImplicitRule(self.config.implicit, self.policy)

    def actor_step(self, batch: Transitions) -> Info:
        """Imitation of the batch, each row alike."""
        loss = self.imitate(batch.obs, batch.chunk, None, batch.mask)
        self.ema.update(self.policy)
        return {"loss": loss}

    def observers(self) -> tuple[Observer, ...]:
        """The shared ones and the averaged policy."""
        return *super().observers(), self.ema.module

    def parts(self) -> Mapping[str, Stateful]:
        """The shared parts and the averaged policy."""
        return {**super().parts(), "ema": self.ema}
