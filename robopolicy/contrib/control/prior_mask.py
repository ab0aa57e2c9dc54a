"""Action masking of CAMEL: a band around a coded prior, applied with decreasing probability (Zhao et al. 2025).

The prior, e.g. a script of a few lines, solves the task roughly. The mask allows the interval
`[max(-1, a - w), min(1, a + w)]` around its action a (normalised actions, half-width w). The policy's action in [-1, 1]
is mapped onto this interval, so that exploration happens near the prior. Each decision is masked with probability
epsilon, which falls faster the more often a critic prefers the policy's own action to the masked one.
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
    """Schedule of the fraction of masked decisions."""

    initial: Fraction = 1.0  # initial epsilon; 0 masks nothing
    decay: FractionBelowOne = 1e-3  # relative decrease per update where the policy is preferred everywhere
    least: Fraction = 0.1  # fraction of this decrease that always applies

    def after(self, epsilon: Tensor, preferred: Tensor) -> Tensor:
        """Next epsilon, given the fraction of observations at which the policy's own action is preferred."""
        fallen = epsilon * (1 - self.decay * preferred.clamp(min=self.least))
        return torch.where(fallen < OVER, torch.zeros_like(fallen), fallen)


class PriorMask(nn.Module):
    """Maps chunks into a band around the chunks of `controller`; holds the controller and epsilon."""

    epsilon: Tensor

    def __init__(self, controller: Policy, width: float, schedule: MaskSchedule, normalizer: Normalizer) -> None:
        """Mask around `controller`.

        Args:
            controller: The prior; its chunks are as long as the policy's, or single actions for a whole chunk.
            width: w, half the width of the band in normalised units.
            schedule: Initial epsilon and its decrease.
            normalizer: The policy's normaliser between action units and [-1, 1].
        """
        super().__init__()
        if width <= 0:
            raise UserError(f"mask.width must be positive, got {width:g}.")
        self.controller, self.width, self.schedule = controller.requires_grad_(False), width, schedule
        self._normalizer = [normalizer]  # owned by the policy, so not registered here
        self.register_buffer("epsilon", torch.tensor(schedule.initial))

    @property
    def finished(self) -> bool:
        """Whether the masking has ended."""
        return not bool(self.epsilon)

    def bounds(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Minimum and maximum actions `(B, H, A)`, or `(B, 1, A)` for a prior of single actions."""
        normalizer = self._normalizer[0]
        prior = normalizer.normalize(self.controller.act(obs, deterministic=True)).clamp(-1, 1)
        low, high = (prior - self.width).clamp(min=-1), (prior + self.width).clamp(max=1)
        return normalizer.denormalize(low), normalizer.denormalize(high)

    def inside(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Map `chunk` `(B, H, A)` from the action bounds onto the band."""
        low, high = self.bounds(obs)
        share = (self._normalizer[0].normalize(chunk).clamp(-1, 1) + 1) / 2
        return torch.lerp(low, high, share).clamp(low, high)

    def apply_to(self, obs: Observation, chunk: Tensor, generator: Randomness = None) -> Tensor:
        """Mask each row of `chunk` `(B, H, A)` with probability epsilon."""
        masked = uniform((len(chunk), 1), generator, chunk.device) < self.epsilon
        return torch.where(masked.unsqueeze(2), self.inside(obs, chunk), chunk)

    def observe(self, preferred: Tensor) -> None:
        """Decrease epsilon, given the fraction of observations at which the policy's own action is preferred."""
        self.epsilon.copy_(self.schedule.after(self.epsilon, preferred))
