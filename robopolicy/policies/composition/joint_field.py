"""Joint velocity of several parents for one batch of observations, and sampler steps with it.

All values are in common coordinates on the linear path. With S_i the scores and u_i the velocities of the parents,
log-densities change along any step dx of length h from time t by

    d log q_i = <S_i, dx - h u_i> - h div u_i + second order in dx.

With the noise of an SDE step only `<S_i, dx - h u_i>` remains (Ito); noise without the directions in which the parents
differ gives the same minus their curvature in these directions. Scores differ by t / (1 - t) times the differences of
velocities, so a step with the joint velocity `sum w_i u_i` changes the log-densities linearly in the weights, which the
operator `and` solves for. Terms that all parents share are omitted: levels are determined up to a constant per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from robopolicy.policies.composition.operators import (
    SAME_VELOCITY,
    And,
    DensityWeighted,
    Lookahead,
    Weights,
    orthonormal,
)
from robopolicy.policies.heads.average_velocity import DIFFERENCE, forward_mode, full_precision
from robopolicy.policies.noise import Randomness, normal

Field = Callable[[Tensor, Tensor], Tensor]
"""Velocity `(B, H_i, A)` of a parent at a chunk `(B, H_i, A)` and linear time `(B,)`."""


@dataclass(frozen=True)
class JointField:
    """Velocity fields of M parents at one batch of observations.

    The common noisy chunk has one row per action, followed by the private rows of parents that denoise more rows than
    executable actions (for example a network that also plans past actions).
    """

    fields: Sequence[Field]
    horizons: tuple[int, ...]  # planned actions of each parent
    private: tuple[int, ...]  # further rows of each parent
    nominal: tuple[float, ...]  # weights independent of the sample

    @property
    def shared(self) -> int:
        """Number of actions that all parents plan."""
        return min(self.horizons)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Rows `(B, R_i, A)` of every parent in `x` `(B, R, A)`."""
        return parent_rows(x, self.horizons, self.private)

    def velocities(self, x: Tensor, t: Tensor) -> list[Tensor]:
        """Velocity `(B, R_i, A)` of every parent for its part of `x`."""
        return [field(part, t) for field, part in zip(self.fields, self.parts(x), strict=True)]

    def mix(self, velocities: Sequence[Tensor], weights: Weights) -> Tensor:
        """Joint velocity `(B, R, A)`; actions of a subset of parents are mixed by their nominal weights."""
        ends = sorted(set(self.horizons))
        if len(ends) == 1 and not any(self.private):
            return _weighted(velocities, weights)
        rows = [_weighted([u[:, : ends[0]] for u in velocities], weights)]
        for start, end in pairwise(ends):
            members = [i for i, horizon in enumerate(self.horizons) if horizon >= end]
            total = sum(self.nominal[i] for i in members)
            fractions = [self.nominal[i] / total if total > 0 else 1 / len(members) for i in members]
            rows.append(_weighted([velocities[i][:, start:end] for i in members], fractions))
        rows += [u[:, horizon:] for u, horizon in zip(velocities, self.horizons, strict=True)]
        return torch.cat(rows, 1)

    def slopes(self, x: Tensor, t: Tensor, tangents: Tensor, how: str) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Velocities of all parents, and their derivatives along each of the `tangents` `(P, B, R, A)`.

        Finite differences take one call of every network with 1 + 2 P times the rows; forward mode takes one call of
        twice the cost per tangent.
        """
        if how != "difference":
            return self._forward_mode(x, t, tangents)
        around = torch.cat([x, *(x + step * tangent for tangent in tangents for step in (DIFFERENCE, -DIFFERENCE))])
        with full_precision(x.device):
            found = [u.split(len(x)) for u in self.velocities(around.float(), t.repeat(1 + 2 * len(tangents)))]
        pairs = range(1, 1 + 2 * len(tangents), 2)
        return [u[0] for u in found], [[(u[i] - u[i + 1]) / (2 * DIFFERENCE) for u in found] for i in pairs]

    def _forward_mode(self, x: Tensor, t: Tensor, tangents: Tensor) -> tuple[list[Tensor], list[list[Tensor]]]:
        us: list[Tensor] = []
        slopes: list[list[Tensor]] = [[] for _ in tangents]
        for number, (field, part) in enumerate(zip(self.fields, self.parts(x), strict=True)):
            for found, tangent in zip(slopes, tangents, strict=True):
                with forward_mode():
                    both = torch.func.jvp(lambda y, field=field: field(y, t), (part,), (self.parts(tangent)[number],))
                u, slope = both[:2]
                found.append(slope)
            us.append(u)
        return us, slopes

    def divergences(
        self, x: Tensor, t: Tensor, probes: int, how: str, generator: torch.Generator
    ) -> tuple[list[Tensor], Tensor]:
        """Velocities and divergences `(B, M)` in the shared actions; see `DensityWeighted` for the probes."""
        directions = self._directions(x, probes, generator)
        us, slopes = self.slopes(x, t, directions.expand(-1, len(x), -1, -1), how)
        total = x.new_zeros(len(x), len(self.fields))
        for direction, slope in zip(directions, slopes, strict=True):
            total = total + self.along(direction, slope)
        return us, total / max(probes, 1)

    def along(self, direction: Tensor, slopes: Sequence[Tensor]) -> Tensor:
        """Components `(B, M)` of the slopes along their own direction."""
        flat = self.flat(direction)
        return torch.stack([(self.flat(slope) * flat).sum(1) for slope in slopes], 1)

    def _directions(self, x: Tensor, probes: int, generator: torch.Generator) -> Tensor:
        """Random signs `(P, 1, R, A)`, or every shared coordinate; 0 outside of the shared actions."""
        if not probes:
            size, shared = x[0].numel(), x[0, : self.shared].numel()
            return torch.eye(size, dtype=x.dtype, device=x.device)[:shared].view(shared, 1, *x.shape[1:])
        signs = torch.randint(0, 2, (probes, 1, *x.shape[1:]), generator=generator, device="cpu").to(x) * 2 - 1
        signs[:, :, self.shared :] = 0
        return signs

    def flat(self, x: Tensor) -> Tensor:
        """Flatten the shared actions to `(B, N)`."""
        return x[:, : self.shared].flatten(1)


def parent_rows(x: Tensor, horizons: Sequence[int], private: Sequence[int]) -> list[Tensor]:
    """Split `x` `(B, R, A)` into the rows `(B, R_i, A)` of every parent: its actions, then its private rows."""
    if not any(private):
        return [x[:, :horizon] for horizon in horizons]
    ends = accumulate(private, initial=max(horizons))
    return [
        torch.cat([x[:, :horizon], x[:, start:end]], 1)
        for horizon, (start, end) in zip(horizons, pairwise(ends), strict=True)
    ]


def _weighted(velocities: Sequence[Tensor], weights: Weights) -> Tensor:
    total = velocities[0] * weights[0]
    for velocity, weight in zip(velocities[1:], weights[1:], strict=True):
        total = total + velocity * weight
    return total


@dataclass(frozen=True)
class SamplerStep:
    """Sampler step from time `t` to `to`: `x' = x + drift * x + velocity_gain * u + noise * n`."""

    t: float
    to: float
    drift: float
    velocity_gain: float
    noise: float

    @classmethod
    def ode(cls, t: float, to: float) -> SamplerStep:
        """Euler step without noise."""
        return cls(t, to, 0.0, to - t, 0.0)

    @classmethod
    def sde(cls, t: float, to: float) -> SamplerStep:
        """Step with the noise of the forward process: the posterior of DDPM, for steps of any length."""
        kept = t * (1 - to) / (to * (1 - t))  # ratio of the noise levels
        direct = (1 - to) * kept  # of the noise in x
        return cls(t, to, to + direct - 1, to * (1 - t) - direct * t, (1 - to) * math.sqrt(1 - kept**2))

    @property
    def length(self) -> float:
        """Change of time."""
        return self.to - self.t

    @property
    def noise_ratio(self) -> float:
        """Ratio of differences of scores to differences of velocities."""
        return self.t / (1 - self.t)

    def apply(self, x: Tensor, velocity: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return the end of the step."""
        end = x + self.velocity_gain * velocity
        if self.drift:
            end = end + self.drift * x
        return end if noise is None else end + self.noise * noise


def adaptive_step(
    joint: JointField,
    operator: DensityWeighted,
    step: SamplerStep,
    x: Tensor,
    levels: Tensor,
    generator: Randomness,
    probe_generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Take a step whose weights follow the log-densities `levels` `(B, M)`; return its end and the levels there.

    The noise of the step comes from `generator`, the directions of divergences, equal for all rows, from
    `probe_generator`.
    """
    t = x.new_full((len(x),), step.t)
    noise, curvature = None, torch.zeros_like(levels)
    if not step.noise and (step.to < 1 or isinstance(operator, And)):
        us, curvature = joint.divergences(x, t, operator.probes, operator.derivative, probe_generator)
    else:  # `or` uses the levels before a step: the last divergence is not needed
        us = joint.velocities(x, t)
    if step.noise:
        noise = normal(x.shape, generator, x.device)
        if isinstance(operator, And):
            noise, curvature = _remove_differences(joint, operator, us, noise, x, t)
    view = _DensityChange.of(joint, step, us, curvature, x)

    def lookahead() -> Lookahead:
        move = step.apply(x, joint.mix(us, joint.nominal)) - x
        return Lookahead(levels + view.change(joint.flat(move)), view.response(), view.floor())

    weights = operator.solve_weights(levels, lookahead)
    end = step.apply(x, joint.mix(us, [w[:, None, None] for w in weights.unbind(1)]), noise)
    levels = levels + view.change(joint.flat(end - x))
    return end, levels - levels.mean(1, keepdim=True)


def adaptive_calls(operator: DensityWeighted, steps: int, parents: int, size: int) -> int:
    """Calls of each parent in `steps` of `adaptive_step` with `size` shared numbers.

    Differences are computed in the call for the velocities, with more rows; forward mode counts as two calls.
    """
    looks_ahead = isinstance(operator, And)
    divergence, curvature = 1, 1  # calls for the velocities and these
    if operator.derivative == "exact":
        divergence, curvature = 2 * (operator.probes or size), 2 * (parents - 1)
    last = divergence if looks_ahead else 1  # `or` needs only velocities; the last step has no noise
    between = divergence if operator.sampler == "ode" else 1 + curvature * looks_ahead
    return between * (steps - 1) + last


@dataclass(frozen=True)
class _DensityChange:
    """Change of the log-densities of the shared actions in a step."""

    step: SamplerStep
    mean: Tensor  # (B, N) of the velocities
    deviations: Tensor  # (B, M, N) velocities minus their mean
    score: Tensor  # (B, N) mean of the scores
    curvature: Tensor  # (B, M)

    @classmethod
    def of(
        cls, joint: JointField, step: SamplerStep, velocities: Sequence[Tensor], curvature: Tensor, x: Tensor
    ) -> _DensityChange:
        stacked = torch.stack([joint.flat(velocity) for velocity in velocities], 1)
        mean = stacked.mean(1)
        score = (step.t * mean - joint.flat(x)) / (1 - step.t)
        return cls(step, mean, stacked - mean[:, None], score, curvature)

    def change(self, move: Tensor) -> Tensor:
        """Change `(B, M)` of the log-densities with the displacement `move` `(B, N)`."""
        h, rho = self.step.length, self.step.noise_ratio
        along = rho * (move - h * self.mean) - h * self.score
        across = (self.deviations * along[:, None]).sum(-1)
        return across - h * rho * self.deviations.square().sum(-1) - h * self.curvature

    def response(self) -> Tensor:
        """Derivative `(B, M, M)` of `change` with respect to the weights."""
        return self.step.noise_ratio * self.step.velocity_gain * self.deviations @ self.deviations.transpose(1, 2)

    def floor(self) -> float:
        """Response of velocities that are treated as equal."""
        return self.step.velocity_gain * SAME_VELOCITY**2 * self.deviations.shape[-1]


def _remove_differences(
    joint: JointField, operator: And, velocities: Sequence[Tensor], noise: Tensor, x: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """Remove the directions in which parents differ from `noise`; also return the curvature `(B, M)` along them."""
    stacked = torch.stack([joint.flat(velocity) for velocity in velocities], 2)  # (B, N, M)
    deviations = (stacked - stacked.mean(2, keepdim=True))[:, :, :-1]  # the sum is 0, so the last one is redundant
    basis = orthonormal(deviations, SAME_VELOCITY * math.sqrt(deviations.shape[1]))
    shared = joint.flat(noise)
    shared = shared - (basis @ (basis.transpose(1, 2) @ shared[:, :, None])).squeeze(2)
    noise = torch.cat([shared.view_as(noise[:, : joint.shared]), noise[:, joint.shared :]], 1)
    tangents = x.new_zeros(basis.shape[2], *x.shape)
    tangents[:, :, : joint.shared] = basis.permute(2, 0, 1).reshape(-1, *x[:, : joint.shared].shape)
    _, slopes = joint.slopes(x, t, tangents, operator.derivative)
    curvature = x.new_zeros(len(x), len(velocities))
    for tangent, slope in zip(tangents, slopes, strict=True):
        curvature = curvature + joint.along(tangent, slope)
    return noise, curvature
