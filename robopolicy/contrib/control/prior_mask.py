"""Actions kept near those of a coded prior, ever less often: CAMEL's action masking (Zhao et al. 2025).

A prior, e.g. a script of a few lines, knows roughly what to do. Around its action a the mask allows the interval
`[max(-1, a - w), min(1, a + w)]` (normalised actions, half-width w), and what a learning policy asks for in [-1, 1] is
mapped onto it, so that exploration happens where it may help. Each decision is masked with probability epsilon, which
falls the faster the more often a critic prefers the policy's own action to the masked one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robopolicy.constraints import Fraction, FractionBelowOne, Validated
from robopolicy.errors import UserError
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.noise import Randomness, uniform

OVER = 1e-3  # a smaller epsilon ends the masking


@dataclass(frozen=True)
class MaskSchedule(Validated):
    """How the share of masked decisions falls."""

    initial: Fraction = 1.0  # at the start; 0 masks nothing
    decay: FractionBelowOne = 1e-3  # relative fall per update where the policy is preferred everywhere
    least: Fraction = 0.1  # share of that fall that happens in any case

    def after(self, epsilon: Tensor, preferred: Tensor) -> Tensor:
        """Next epsilon, given the share of observations at which the policy's own action is preferred."""
        fallen = epsilon * (1 - self.decay * preferred.clamp(min=self.least))
        return torch.where(fallen < OVER, torch.zeros_like(fallen), fallen)


class PriorMask(nn.Module):
    """Maps chunks into a band around those of `controller`; holds it and epsilon."""

    epsilon: Tensor

    def __init__(self, controller: Policy, width: float, schedule: MaskSchedule, normalizer: Normalizer) -> None:
        """Mask around `controller`.

        Args:
            controller: The prior; its chunks are as long as the policy's, or single actions for a whole chunk.
            width: w, half the width of the band in normalised units.
            schedule: How epsilon begins and falls.
            normalizer: Between action units and [-1, 1], that of the policy.
        """
        super().__init__()
        if width <= 0:
            raise UserError(f"mask.width must be positive, got {width:g}.")
        self.controller, self.width, self.schedule = controller.requires_grad_(False), width, schedule
        self._normalizer = [normalizer]  # the policy's own, not a part of this
        self.register_buffer("epsilon", torch.tensor(schedule.initial))

    @property
    def over(self) -> bool:
        """Whether nothing is masked any more."""
        return not bool(self.epsilon)

    def bounds(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Lowest and highest allowed actions `(B, H, A)`, or `(B, 1, A)` for a prior of single actions."""
        normalizer = self._normalizer[0]
        prior = normalizer.normalize(self.controller.act(obs, deterministic=True)).clamp(-1, 1)
        low, high = (prior - self.width).clamp(min=-1), (prior + self.width).clamp(max=1)
        return normalizer.denormalize(low), normalizer.denormalize(high)

    def inside(self, obs: Observation, chunk: Tensor) -> Tensor:
        """`chunk` `(B, H, A)`, mapped from the action bounds onto the band."""
        low, high = self.bounds(obs)
        share = (self._normalizer[0].normalize(chunk).clamp(-1, 1) + 1) / 2
        return torch.lerp(low, high, share).clamp(low, high)

    def apply_to(self, obs: Observation, chunk: Tensor, generator: Randomness = None) -> Tensor:
        """`chunk` `(B, H, A)` with each row masked with probability epsilon."""
        masked = uniform((len(chunk), 1), generator, chunk.device) < self.epsilon
        return torch.where(masked.unsqueeze(2), self.inside(obs, chunk), chunk)

    def observe(self, preferred: Tensor) -> None:
        """Let epsilon fall, given the share of observations at which the policy's own action is preferred."""
        self.epsilon.copy_(self.schedule.after(self.epsilon, preferred))
