"""A policy that improves its samples by critic gradients and executes the best one (PA-RL, Mark et al. 2024).

Of m samples of any base policy the k best by mean Q stay; each climbs the critic for T gradient steps and keeps the
best point it has seen, so it never gets worse than it started. T = 0 is best-of-N, and m = k = 1, T = 0 the base.

Steps are taken in normalised action units and only on the executed actions, which are all that the critic sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import AtMost, NonNegativeInt, Positive, PositiveInt
from robopolicy.critics.q import QEnsemble
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.best_of_n import (
    BestOfNConfig,
    BestOfNPolicy,
    Candidates,
    reduce_members,
    within_bounds,
)
from robopolicy.policies.wrappers.nested import describe


@dataclass(frozen=True)
class ActionOptimizedConfig(BestOfNConfig):
    """Settings of an `ActionOptimizedPolicy`; `candidates` is m."""

    top: Annotated[PositiveInt, AtMost("candidates")] = 10  # k, candidates that are kept and improved
    ascent_steps: NonNegativeInt = 10  # T, gradient steps on each
    ascent_rate: Positive = 3e-4  # step size, normalised action units per unit of dQ/da


def ascend(
    critic: QEnsemble, obs: Observation, found: Candidates, *, steps: int, rate: float, reduction: str = "mean"
) -> Candidates:
    """Climb the value from every candidate by gradient steps; each keeps the best point seen.

    Works under `no_grad` and in inference mode, and leaves no gradients behind.
    """
    if steps == 0:
        return found
    with torch.no_grad():
        encoded = critic.encode(obs).repeat_interleave(found.chunks.shape[1], 0)
    normalizer = critic.action_normalizer
    with torch.inference_mode(False), torch.enable_grad():
        # Tensors made in inference mode cannot be differentiated through; their clones can.
        features, best, value = encoded.clone(), found.chunks.flatten(0, 1).clone(), found.values.flatten().clone()
        start = x = normalizer.normalize(best)
        for step in range(steps + 1):
            x = x.detach().requires_grad_(step < steps)
            chunk = normalizer.denormalize(x)
            q = reduce_members(critic.value(critic.output(features, chunk)), reduction)
            if step:
                better = q.detach() > value
                value = torch.where(better, q.detach(), value)
                best = torch.where(better[:, None, None], chunk.detach(), best)
            if step < steps:
                (gradient,) = torch.autograd.grad(q.sum(), x)
                x = within_bounds(normalizer, x + rate * gradient, start)
    return Candidates(best.view_as(found.chunks), value.view_as(found.values))


class ActionOptimizedPolicy(BestOfNPolicy):
    """Best of the improved samples; verbs of `BestOfNPolicy`."""

    name: ClassVar[str] = "optimized"
    config_class = ActionOptimizedConfig
    config: ActionOptimizedConfig

    @property
    def nfe(self) -> int:
        """Those of all samples, one of the critic for each, and one per gradient step and kept candidate."""
        steps = self.config.ascent_steps
        return super().nfe + (self.config.top * (steps + 1) if steps else 0)

    @torch.no_grad()
    def propose(
        self,
        obs: Observation,
        *,
        deterministic: bool = False,
        generator: Randomness = None,
        known: Tensor | None = None,
    ) -> Candidates:
        """The k improved candidates; `known` chunks `(B, H, A)` take the place of the worst before they climb."""
        found = super().propose(obs, deterministic=deterministic, generator=generator)
        values, index = found.values.topk(self.config.top, 1)
        rows = torch.arange(len(values), device=values.device)[:, None]
        chunks = found.chunks[rows, index]
        if known is not None:
            chunks = torch.cat([chunks[:, :-1], known[:, None]], 1)
            values = torch.cat([values[:, :-1], self.score(obs, known[:, None])], 1)
        return ascend(
            self.critic,
            obs,
            Candidates(chunks, values),
            steps=self.config.ascent_steps,
            rate=self.config.ascent_rate,
            reduction=self.config.reduction,
        )


def make_action_optimized(base: Policy, critic: QEnsemble, **settings: Any) -> ActionOptimizedPolicy:
    """Improved samples of `base` by `critic`, both shared; `settings` are those of `ActionOptimizedConfig`."""
    config = ActionOptimizedConfig(base=describe(base), critic=critic.config, **settings)
    return ActionOptimizedPolicy(config, base=base, critic=critic)
