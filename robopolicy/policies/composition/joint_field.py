"""The joint velocity of several parents for one batch of observations, and the steps that are taken with it.

Everything here is in common coordinates on the linear path. With S_i the scores and u_i the velocities of the parents,
log-densities change along any step dx of length h from time t by

    d log q_i = <S_i, dx - h u_i> - h div u_i + second order in dx,

which the noise of an SDE step turns into `<S_i, dx - h u_i>` alone (Ito), and noise without the directions in which the
parents differ into the same minus their curvature in these directions. Scores differ as velocities do, by t / (1 - t),
so a step with the joint velocity `sum w_i u_i` changes the log-densities linearly in the weights: that is what `and`
solves for. The terms in which all parents agree are left out: levels are known up to a constant per row.
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

    The common noisy chunk has a row per action and, behind them, the private rows of parents that denoise more than
    actions to be played (a network that plans the past as well): these concern their parent alone.
    """

    fields: Sequence[Field]
    horizons: tuple[int, ...]  # actions that each parent plans
    private: tuple[int, ...]  # further rows of each parent
    nominal: tuple[float, ...]  # weights before anything is known of the sample

    @property
    def shared(self) -> int:
        """Actions that all parents plan."""
        return min(self.horizons)

    def parts(self, x: Tensor) -> list[Tensor]:
        """What every parent sees of `x` `(B, R, A)`: `(B, R_i, A)`."""
        return rows_of(x, self.horizons, self.private)

    def velocities(self, x: Tensor, t: Tensor) -> list[Tensor]:
        """Velocity `(B, R_i, A)` of every parent for its part of `x`."""
        return [field(part, t) for field, part in zip(self.fields, self.parts(x), strict=True)]

    def mix(self, velocities: Sequence[Tensor], weights: Weights) -> Tensor:
        """Joint velocity `(B, R, A)`.

        Actions that only some parents plan are theirs, in the proportion of the nominal weights.
        """
        ends = sorted(set(self.horizons))
        if len(ends) == 1 and not any(self.private):
            return _weighted(velocities, weights)
        rows = [_weighted([u[:, : ends[0]] for u in velocities], weights)]
        for start, end in pairwise(ends):
            members = [i for i, horizon in enumerate(self.horizons) if horizon >= end]
            total = sum(self.nominal[i] for i in members)
            share = [self.nominal[i] / total if total > 0 else 1 / len(members) for i in members]
            rows.append(_weighted([velocities[i][:, start:end] for i in members], share))
        rows += [u[:, horizon:] for u, horizon in zip(velocities, self.horizons, strict=True)]
        return torch.cat(rows, 1)

    def slopes(self, x: Tensor, t: Tensor, tangents: Tensor, how: str) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Velocities of all parents, and their changes along each of the `tangents` `(P, B, R, A)`.

        Differences are taken of one call of every network with 1 + 2 P times the rows; forward mode takes a call, at
        twice the cost, per tangent.
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
        """Velocities and divergences `(B, M)` in the shared actions; `DensityWeighted` describes probes."""
        directions = self._directions(x, probes, generator)
        us, slopes = self.slopes(x, t, directions.expand(-1, len(x), -1, -1), how)
        total = x.new_zeros(len(x), len(self.fields))
        for direction, slope in zip(directions, slopes, strict=True):
            total = total + self.along(direction, slope)
        return us, total / max(probes, 1)

    def along(self, direction: Tensor, slopes: Sequence[Tensor]) -> Tensor:
        """Components `(B, M)` of the slopes in the direction they were taken in."""
        own = self.flat(direction)
        return torch.stack([(self.flat(slope) * own).sum(1) for slope in slopes], 1)

    def _directions(self, x: Tensor, probes: int, generator: torch.Generator) -> Tensor:
        """Random signs `(P, 1, R, A)`, or every shared coordinate; 0 beyond the shared actions."""
        if not probes:
            size, shared = x[0].numel(), x[0, : self.shared].numel()
            return torch.eye(size, dtype=x.dtype, device=x.device)[:shared].view(shared, 1, *x.shape[1:])
        signs = torch.randint(0, 2, (probes, 1, *x.shape[1:]), generator=generator, device="cpu").to(x) * 2 - 1
        signs[:, :, self.shared :] = 0
        return signs

    def flat(self, x: Tensor) -> Tensor:
        """The shared actions as rows `(B, N)`."""
        return x[:, : self.shared].flatten(1)


def rows_of(x: Tensor, horizons: Sequence[int], private: Sequence[int]) -> list[Tensor]:
    """The rows `(B, R_i, A)` of every parent: its actions, and then its private rows of `x` `(B, R, A)`."""
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
    """One step of a sampler from time `t` to `to`: `x' = x + drift * x + push * u + noise * n`."""

    t: float
    to: float
    drift: float
    velocity_gain: float
    noise: float

    @classmethod
    def ode(cls, t: float, to: float) -> SamplerStep:
        """Without noise: Euler's."""
        return cls(t, to, 0.0, to - t, 0.0)

    @classmethod
    def sde(cls, t: float, to: float) -> SamplerStep:
        """With as much noise as the forward process has taken on the way: DDPM's posterior, for steps of any length."""
        kept = t * (1 - to) / (to * (1 - t))  # ratio of the noise levels
        direct = (1 - to) * kept  # of the noise in x
        return cls(t, to, to + direct - 1, to * (1 - t) - direct * t, (1 - to) * math.sqrt(1 - kept**2))

    @property
    def length(self) -> float:
        """Change of time."""
        return self.to - self.t

    @property
    def noise_ratio(self) -> float:
        """Scores differ by this times what velocities differ by."""
        return self.t / (1 - self.t)

    def apply(self, x: Tensor, velocity: Tensor, noise: Tensor | None = None) -> Tensor:
        """The end of the step."""
        end = x + self.velocity_gain * velocity
        if self.drift:
            end = end + self.drift * x
        return end if noise is None else end + self.noise * noise


def adaptive_step(
    blend: JointField,
    operator: DensityWeighted,
    step: SamplerStep,
    x: Tensor,
    levels: Tensor,
    generator: Randomness,
    probing: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """End of a step whose weights follow the log-densities `levels` `(B, M)`, and the levels there.

    A step with noise draws it from `generator`; directions of divergences, the same for all rows, come from `probing`.
    """
    t = x.new_full((len(x),), step.t)
    noise, curvature = None, torch.zeros_like(levels)
    if not step.noise and (step.to < 1 or isinstance(operator, And)):
        us, curvature = blend.divergences(x, t, operator.probes, operator.derivative, probing)
    else:  # `or` weighs by the levels before a step: nobody asks for the last
        us = blend.velocities(x, t)
    if step.noise:
        noise = normal(x.shape, generator, x.device)
        if isinstance(operator, And):
            noise, curvature = _without_differences(blend, operator, us, noise, x, t)
    view = _View.of(blend, step, us, curvature, x)

    def outlook() -> Lookahead:
        move = step.apply(x, blend.mix(us, blend.nominal)) - x
        return Lookahead(levels + view.rise(blend.flat(move)), view.response(), view.floor())

    weights = operator.solve_weights(levels, outlook)
    end = step.apply(x, blend.mix(us, [w[:, None, None] for w in weights.unbind(1)]), noise)
    levels = levels + view.rise(blend.flat(end - x))
    return end, levels - levels.mean(1, keepdim=True)


def adaptive_calls(operator: DensityWeighted, steps: int, parents: int, size: int) -> int:
    """Calls of each parent in `steps` of `adaptive_step` with `size` shared numbers.

    Differences come with the velocities, in a call of more rows; one in forward mode counts as two calls.
    """
    looks_ahead = isinstance(operator, And)
    divergence, curvature = 1, 1  # calls that give both the velocities and these
    if operator.derivative == "exact":
        divergence, curvature = 2 * (operator.probes or size), 2 * (parents - 1)
    last = divergence if looks_ahead else 1  # `or` asks for nothing more; no step ends with noise
    between = divergence if operator.sampler == "ode" else 1 + curvature * looks_ahead
    return between * (steps - 1) + last


@dataclass(frozen=True)
class _View:
    """How log-densities of the shared actions change with a step."""

    step: SamplerStep
    mean: Tensor  # (B, N) of the velocities
    apart: Tensor  # (B, M, N) velocities less their mean
    score: Tensor  # (B, N) mean of the scores
    curvature: Tensor  # (B, M)

    @classmethod
    def of(
        cls, blend: JointField, step: SamplerStep, velocities: Sequence[Tensor], curvature: Tensor, x: Tensor
    ) -> _View:
        every = torch.stack([blend.flat(velocity) for velocity in velocities], 1)
        mean = every.mean(1)
        score = (step.t * mean - blend.flat(x)) / (1 - step.t)
        return cls(step, mean, every - mean[:, None], score, curvature)

    def rise(self, move: Tensor) -> Tensor:
        """Change `(B, M)` of the log-densities with the move `(B, N)`."""
        h, rho = self.step.length, self.step.noise_ratio
        along = rho * (move - h * self.mean) - h * self.score
        across = (self.apart * along[:, None]).sum(-1)
        return across - h * rho * self.apart.square().sum(-1) - h * self.curvature

    def response(self) -> Tensor:
        """Change `(B, M, M)` of the rise with the weights."""
        return self.step.noise_ratio * self.step.velocity_gain * self.apart @ self.apart.transpose(1, 2)

    def floor(self) -> float:
        """Response of velocities that count as equal."""
        return self.step.velocity_gain * SAME_VELOCITY**2 * self.apart.shape[-1]


def _without_differences(
    blend: JointField, operator: And, velocities: Sequence[Tensor], noise: Tensor, x: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """`noise` without the directions in which the parents differ, and the curvature `(B, M)` in these directions."""
    every = torch.stack([blend.flat(velocity) for velocity in velocities], 2)  # (B, N, M)
    apart = (every - every.mean(2, keepdim=True))[:, :, :-1]  # the last is what the others lack to 0
    basis = orthonormal(apart, SAME_VELOCITY * math.sqrt(apart.shape[1]))
    shared = blend.flat(noise)
    shared = shared - (basis @ (basis.transpose(1, 2) @ shared[:, :, None])).squeeze(2)
    noise = torch.cat([shared.view_as(noise[:, : blend.shared]), noise[:, blend.shared :]], 1)
    tangents = x.new_zeros(basis.shape[2], *x.shape)
    tangents[:, :, : blend.shared] = basis.permute(2, 0, 1).reshape(-1, *x[:, : blend.shared].shape)
    _, slopes = blend.slopes(x, t, tangents, operator.derivative)
    curvature = x.new_zeros(len(x), len(velocities))
    for tangent, slope in zip(tangents, slopes, strict=True):
        curvature = curvature + blend.along(tangent, slope)
    return noise, curvature
