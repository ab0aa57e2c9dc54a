"""Adapter of a parent to the linear path: its velocity, the steps of its own sampler, and its bounds.

DDIM, Euler steps of EDM and those of a flow are one and the same thing on the linear path, `x + (t' - t) u`; samplers
differ in the times they visit and in the spread of the first iterate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.heads.average_velocity import AverageVelocityPolicy, ShortcutPolicy
from robopolicy.policies.heads.diffusion import DiffusionPolicy
from robopolicy.policies.heads.edm import EDMPolicy
from robopolicy.policies.heads.flow import FlowPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import left_grid
from robopolicy.policies.wrappers.staged import StagedDiffusion

MIN_STEPS = 8  # Euler steps for a head that leaps, where it has to be read as a flow


@runtime_checkable
class Encoding(Protocol):
    """A policy whose velocity takes observations that have been encoded before, as all generative heads."""

    def encode(self, obs: Observation) -> Any:
        """Features of the observations."""
        ...

    def velocity(self, features: Any, x: Tensor, t: Tensor) -> Tensor:
        """Velocity `(B, R, A)` at `x` `(B, R, A)` and linear time `t` `(B,)`."""
        ...


@runtime_checkable
class Sampling(Protocol):
    """A policy from another library, which describes its own sampler."""

    def sampler_grid(self) -> TimeGrid:
        """Steps of the sampler."""
        ...

    def action_bound(self) -> float:
        """Largest normalised action; infinite if it has no bound."""
        ...


@dataclass(frozen=True)
class TimeGrid:
    """The steps of a sampler on the linear path."""

    times: tuple[float, ...]  # K + 1 rising times; the last is 1
    spread: float = 1.0  # the first iterate is this times standard normal noise

    @property
    def steps(self) -> int:
        """K."""
        return len(self.times) - 1

    def snr_from(self, level: float) -> TimeGrid:
        """The same steps in common coordinates, in which noise is `level` times weaker than in the parent's."""
        if level == 1:
            return self
        times = tuple(level * t / (level * t + 1 - t) for t in self.times)
        return TimeGrid(times, self.spread * (times[0] + (1 - times[0]) * level) / level)


def uniform_grid(steps: int) -> TimeGrid:
    """Equal steps from pure noise."""
    return TimeGrid((*left_grid(steps).tolist(), 1.0))


def variance_preserving_grid(signal: Tensor, noise: Tensor) -> TimeGrid:
    """Steps between points `(K + 1,)` of the variance-preserving path, given by their coefficients."""
    total = signal.double() + noise.double()
    return TimeGrid(tuple((signal.double() / total).tolist()), float(1 / total[0]))


def _outer(policy: Policy) -> Policy:
    """The head that defines units and steps."""
    return policy.heads[0] if isinstance(policy, StagedDiffusion) else policy


def units(policy: Policy) -> Normalizer:
    """Units of the velocities of a parent.

    Raises:
        UserError: It does not define it.
    """
    found = getattr(_outer(policy), "action_normalizer", None)
    if not isinstance(found, Normalizer):
        raise UserError(
            f"Policy '{policy.name}' has no action_normalizer, so the units of its velocities are unknown; compose the "
            "head it is made of."
        )
    return found


def private_rows(policy: Policy) -> int:
    """Rows that a parent denoises besides the actions of its chunk, which come first."""
    return policy.noise_shape[0] - policy.spec.horizon


def native_grid(policy: Policy, *, leaps: bool) -> TimeGrid:
    """Steps of the parent's own sampler; `leaps` if its steps may be taken as it has learned them."""
    policy = _outer(policy)
    if isinstance(policy, Sampling):
        return policy.sampler_grid()
    if isinstance(policy, DiffusionPolicy):
        return variance_preserving_grid(policy.signal_scale, policy.noise_scale)
    if isinstance(policy, EDMPolicy):
        sigmas = policy.sigmas.double()
        times = (1 / (1 + sigmas)).tolist()
        return TimeGrid(tuple(times), 1 - times[0])
    if isinstance(policy, AverageVelocityPolicy) and not leaps:
        return uniform_grid(max(policy.config.steps, MIN_STEPS))
    return uniform_grid(policy.nfe)


def bound(policy: Policy) -> float:
    """Largest normalised action of a parent; infinite if it has no bound."""
    policy = _outer(policy)
    if isinstance(policy, Sampling):
        return policy.action_bound()
    clip = policy.config.action_clip if isinstance(policy, GenerativePolicy) else 0.0
    return clip or float("inf")


def bounds_iterates(policy: Policy) -> bool:
    """Whether its sampler bounds every iterate and not only clean chunks."""
    return isinstance(policy, FlowPolicy)


def supports_large_steps(policies: Sequence[Policy], steps: int) -> bool:
    """Whether all of them have learned steps of length 1 / `steps`."""
    halving = all(
        steps <= p.config.max_steps and steps & (steps - 1) == 0 for p in policies if isinstance(p, ShortcutPolicy)
    )
    return halving and all(isinstance(policy, AverageVelocityPolicy) for policy in policies)


def velocity_field(policy: Policy, obs: Observation, length: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """The parent's velocity `(K B, R, A)` at B observations as a function of K stacked `x` and linear times `(K B,)`.

    Of a head that leaps it is the mean over a step of `length` where that is not 0. Observations are encoded once, and
    heads answer all K at once.
    """
    if not isinstance(policy, Encoding):
        return _one_by_one(lambda x, t: policy.field(obs, x, t), len(next(iter(obs.values()))))
    features = policy.encode(obs)
    if isinstance(features, Tensor):
        features = features.float()  # autocast leaves those of cameras in bfloat16, which differences could not read
    if length:
        assert isinstance(policy, AverageVelocityPolicy)
        return lambda x, t: policy.average(_stacked(features, len(x)), x, t, torch.full_like(t, length))
    if not isinstance(features, Tensor):
        return _one_by_one(lambda x, t: policy.velocity(features, x, t), len(next(iter(obs.values()))))
    return lambda x, t: policy.velocity(_stacked(features, len(x)), x, t)


def _stacked(features: Tensor, rows: int) -> Tensor:
    """`features` `(B, ...)` repeated to `rows`."""
    copies = rows // len(features)
    return features if copies == 1 else features.repeat(copies, *(1 for _ in features.shape[1:]))


def _one_by_one(field: Callable[[Tensor, Tensor], Tensor], batch: int) -> Callable[[Tensor, Tensor], Tensor]:
    """`field` for any multiple of the `batch` rows that it knows."""

    def split(x: Tensor, t: Tensor) -> Tensor:
        if len(x) == batch:
            return field(x, t)
        return torch.cat([field(*part) for part in zip(x.split(batch), t.split(batch), strict=True)])

    return split
