"""Policy that improves its samples by critic gradients and executes the best one (PA-RL, Mark et al. 2024).

The k best of m samples of any base policy by mean Q are kept; each takes T gradient ascent steps on Q and keeps its
best point, so its value never decreases. T = 0 is best-of-N, and m = k = 1, T = 0 is the base policy. Steps are taken
in normalised action units on the executed actions, the only input of the critic.
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
    clip_to_bounds,
    reduce_members,
)
from robopolicy.policies.wrappers.nested import describe


@dataclass(frozen=True)
class ActionOptimizedConfig(BestOfNConfig):
    """Settings of an `ActionOptimizedPolicy`; `candidates` is m."""

    top: Annotated[PositiveInt, AtMost("candidates")] = 10  # k, candidates to keep and improve
    ascent_steps: NonNegativeInt = 10  # T, gradient steps on each
    ascent_rate: Positive = 3e-4  # step size, normalised action units per unit of dQ/da


def ascend(
    critic: QEnsemble, obs: Observation, found: Candidates, *, steps: int, rate: float, reduction: str = "mean"
) -> Candidates:
    """Improve the value of every candidate by gradient ascent and keep its best point; also without gradient mode."""
    if steps == 0:
        return found
    with torch.no_grad():
        encoded = critic.encode(obs).repeat_interleave(found.chunks.shape[1], 0)
    normalizer = critic.action_normalizer
    with torch.inference_mode(False), torch.enable_grad():
        # Autograd rejects inference tensors, but accepts their clones.
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
                x = clip_to_bounds(normalizer, x + rate * gradient, start)
    return Candidates(best.view_as(found.chunks), value.view_as(found.values))


class ActionOptimizedPolicy(BestOfNPolicy):
    """Best of the improved samples; methods of `BestOfNPolicy`."""

    name: ClassVar[str] = "optimized"
    config_class = ActionOptimizedConfig
    config: ActionOptimizedConfig

    @property
    def nfe(self) -> int:
        """Evaluations of all samples, of the critic per sample, and per gradient step and kept candidate."""
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
        """Propose the k improved candidates; `known` chunks `(B, H, A)` replace the worst ones before the ascent."""
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
    """Improved samples of `base` by `critic`, both shared; `settings` are fields of `ActionOptimizedConfig`."""
    config = ActionOptimizedConfig(base=describe(base), critic=critic.config, **settings)
    return ActionOptimizedPolicy(config, base=base, critic=critic)
