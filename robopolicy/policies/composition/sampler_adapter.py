"""Adapter of a parent to the linear path: its velocity, the steps of its own sampler, and its bounds.

DDIM and the Euler steps of EDM and flows are identical on the linear path, `x + (t' - t) u`; samplers differ in their
times and in the standard deviation of the first iterate.
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

MIN_STEPS = 8  # Euler steps of a head with learned large steps if it is used as a plain flow


@runtime_checkable
class Encoding(Protocol):
    """Policy whose velocity takes encoded observations, as in all generative heads."""

    def encode(self, obs: Observation) -> Any:
        """Features of the observations."""
        ...

    def velocity(self, features: Any, x: Tensor, t: Tensor) -> Tensor:
        """Velocity `(B, R, A)` at `x` `(B, R, A)` and linear time `t` `(B,)`."""
        ...


@runtime_checkable
class Sampling(Protocol):
    """Policy of another library that describes its sampler."""

    def sampler_grid(self) -> TimeGrid:
        """Steps of the sampler."""
        ...

    def action_bound(self) -> float:
        """Largest normalised action; infinite if it has no bound."""
        ...


@dataclass(frozen=True)
class TimeGrid:
    """Steps of a sampler on the linear path."""

    times: tuple[float, ...]  # K + 1 rising times; the last is 1
    spread: float = 1.0  # standard deviation of the first iterate

    @property
    def steps(self) -> int:
        """K."""
        return len(self.times) - 1

    def snr_from(self, level: float) -> TimeGrid:
        """The same steps in common coordinates, in which noise is `level` times weaker than for the parent."""
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


def _first_head(policy: Policy) -> Policy:
    """Head that defines units and steps."""
    return policy.heads[0] if isinstance(policy, StagedDiffusion) else policy


def units(policy: Policy) -> Normalizer:
    """Normaliser that defines the units of the velocities of a parent; raise a `UserError` without one."""
    found = getattr(_first_head(policy), "action_normalizer", None)
    if not isinstance(found, Normalizer):
        raise UserError(
            f"Policy '{policy.name}' has no action_normalizer, so the units of its velocities are unknown; compose its "
            "head."
        )
    return found


def private_rows(policy: Policy) -> int:
    """Number of rows that a parent denoises after the actions of its chunk."""
    return policy.noise_shape[0] - policy.spec.horizon


def native_grid(policy: Policy, *, large_steps: bool) -> TimeGrid:
    """Steps of the sampler of the parent; `large_steps` if its learned steps may be used."""
    policy = _first_head(policy)
    if isinstance(policy, Sampling):
        return policy.sampler_grid()
    if isinstance(policy, DiffusionPolicy):
        return variance_preserving_grid(policy.signal_scale, policy.noise_scale)
    if isinstance(policy, EDMPolicy):
        sigmas = policy.sigmas.double()
        times = (1 / (1 + sigmas)).tolist()
        return TimeGrid(tuple(times), 1 - times[0])
    if isinstance(policy, AverageVelocityPolicy) and not large_steps:
        return uniform_grid(max(policy.config.steps, MIN_STEPS))
    return uniform_grid(policy.nfe)


def bound(policy: Policy) -> float:
    """Largest normalised action of a parent; infinite if it has no bound."""
    policy = _first_head(policy)
    if isinstance(policy, Sampling):
        return policy.action_bound()
    clip = policy.config.action_clip if isinstance(policy, GenerativePolicy) else 0.0
    return clip or float("inf")


def bounds_iterates(policy: Policy) -> bool:
    """Whether the sampler bounds every iterate, not only clean chunks."""
    policy = _first_head(policy)
    return isinstance(policy, FlowPolicy) and policy.config.clip_iterates


def supports_large_steps(policies: Sequence[Policy], steps: int) -> bool:
    """Whether all policies have learned steps of length 1 / `steps`."""
    halving = all(
        steps <= p.config.max_steps and steps & (steps - 1) == 0 for p in policies if isinstance(p, ShortcutPolicy)
    )
    return halving and all(isinstance(policy, AverageVelocityPolicy) for policy in policies)


def velocity_field(policy: Policy, obs: Observation, length: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """Velocity `(K B, R, A)` of a parent at B observations, as a function of K stacked `x` and linear times `(K B,)`.

    With `length` > 0 it is the mean over a step of that length, for heads with large steps. Observations are encoded
    once, and heads evaluate all K points in one call.
    """
    if not isinstance(policy, Encoding):
        return _in_batches(lambda x, t: policy.field(obs, x, t), len(next(iter(obs.values()))))
    features = policy.encode(obs)
    if isinstance(features, Tensor):
        features = features.float()  # finite differences need more precision than the bfloat16 of autocast
    if length:
        assert isinstance(policy, AverageVelocityPolicy)
        return lambda x, t: policy.average(_stacked(features, len(x)), x, t, torch.full_like(t, length))
    if not isinstance(features, Tensor):
        return _in_batches(lambda x, t: policy.velocity(features, x, t), len(next(iter(obs.values()))))
    return lambda x, t: policy.velocity(_stacked(features, len(x)), x, t)


def _stacked(features: Tensor, rows: int) -> Tensor:
    """Repeat `features` `(B, ...)` to `rows`."""
    copies = rows // len(features)
    return features if copies == 1 else features.repeat(copies, *(1 for _ in features.shape[1:]))


def _in_batches(field: Callable[[Tensor, Tensor], Tensor], batch: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Extend `field` from `batch` rows to any multiple of them."""

    def split(x: Tensor, t: Tensor) -> Tensor:
        if len(x) == batch:
            return field(x, t)
        return torch.cat([field(*part) for part in zip(x.split(batch), t.split(batch), strict=True)])

    return split
