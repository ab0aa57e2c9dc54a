"""Base of the heads that learn steps of any length: a network of two times, start and step length.

`average(features, x, t, h)` is the mean velocity along the flow from `x` at time `t` to time `t + h`, so one step of
length h is `x + h * average`. Length 0 is the instantaneous velocity of a plain flow, which `velocity` returns and
`matching_loss` trains. Shortcut models and MeanFlow differ in how they learn the other lengths.

Iterates are clipped as in a plain flow (see `flow`); with one step this only bounds the chunk. Their chains belong to
the flow family, so methods that fine-tune the transitions of a flow (ReinFlow) also fine-tune these heads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from robopolicy.constraints import AtLeastTwo, AtMost, Fraction, FractionBelowOne, NonNegative, Positive, PositiveInt
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import chunk_mean
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.generative import TIME_DISTRIBUTIONS
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import interpolate


@dataclass(frozen=True)
class AverageVelocityConfig(FlowConfig):
    """Architecture and sampler of the heads with two times."""

    dispersive_coef: NonNegative = 0.0  # weight of the dispersive loss on the middle layer; DMPO uses 0.5
    dispersive_temperature: Positive = 0.3


class TrainingTarget(NamedTuple):
    """Inputs and regression target of the network in training."""

    x: Tensor  # (B, H, A)
    t: Tensor  # (B,)
    length: Tensor  # (B,) step length
    target: Tensor  # (B, H, A) average velocity, without gradient


class AverageVelocityPolicy(FlowPolicy):
    """Base of shortcut and MeanFlow heads."""

    times = 2
    config: AverageVelocityConfig

    @abstractmethod
    def training_target(self, features: Tensor, data: Tensor, noise: Tensor, generator: Randomness) -> TrainingTarget:
        """Points, step lengths and targets of one minibatch."""

    def reduce(self, error: Tensor, mask: Tensor | None = None) -> Tensor:
        """Loss `(B, H)` of the regression `error` `(B, H, A)`, whose padded steps have a `mask` `(B, H)` of 0."""
        return error.square().mean(-1)

    def time_inputs(self, t: Tensor, length: Tensor) -> Tensor:
        """Time inputs `(B, 2)` of the network for a step."""
        return torch.stack([t, length], -1)

    def average(self, features: Tensor, x: Tensor, t: Tensor, length: Tensor) -> Tensor:
        """Average velocity `(B, H, A)` of the step from `x` at `t` `(B,)` to `t + length`."""
        return self.backbone(x, self.time_inputs(t, length), features)

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Instantaneous velocity, the limit of step length 0."""
        return self.average(features, x, t, torch.zeros_like(t))

    def step(self, features: Tensor, x: Tensor, k: Tensor) -> Tensor:
        """One learned step of length 1 / K from time k / K, before clipping."""
        t = self.grid[k]
        length = 1 / self.config.steps
        return x + self.average(features, x, t, torch.full_like(t, length)) * length

    def training_loss(
        self, features: Tensor, data: Tensor, generator: Randomness, mask: Tensor | None = None
    ) -> Tensor:
        """Regression on the targets of `training_target`, with the dispersive loss if enabled."""
        noise = normal(data.shape, generator, data.device)
        x, t, length, target = self.training_target(features, data, noise, generator)
        loss = self.reduce(self.average(features, x, t, length) - target, mask)
        if self.config.dispersive_coef:
            middle = self.backbone.representation(x, self.time_inputs(t, length), features)  # type: ignore[operator]
            loss = loss + self.config.dispersive_coef * dispersive_loss(middle, self.config.dispersive_temperature)
        return loss


def dispersive_loss(z: Tensor, temperature: float) -> Tensor:
    """InfoNCE without positives, with squared distances (Wang and He 2025): lower for distant rows of `z` `(B, D)`.

    `log mean_ij exp(-|z_i - z_j|^2 / (D temperature))` over all pairs, including a row with itself.
    """
    distance = torch.pdist(z.float()).square() / z.shape[1]  # (B (B - 1) / 2,)
    both = torch.cat([distance, distance, distance.new_zeros(len(z))]) / temperature
    return torch.logsumexp(-both, 0) - torch.log(torch.tensor(float(len(both)), device=z.device))


@dataclass(frozen=True)
class ShortcutConfig(AverageVelocityConfig):
    """Architecture, sampler and objective of a `ShortcutPolicy`."""

    steps: Annotated[PositiveInt, AtMost("max_steps")] = 1  # K, a power of two up to `max_steps`
    max_steps: AtLeastTwo = 128  # half steps of length 1 / max_steps use length 0; a power of two
    consistency_share: Fraction = 0.25  # fraction of the batch that learns self-consistency; the rest learns the flow
    delta: FractionBelowOne = 1e-5  # noise left on the data end of the path

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("steps", self.steps), ("max_steps", self.max_steps)):
            if value & (value - 1):
                raise UserError(f"A shortcut policy halves its steps, so {name} must be a power of two, got {value}.")


SHORTCUT_BOUND = 4.0  # largest magnitude of half-way points and of targets of two half steps, as in the public code


class ShortcutPolicy(AverageVelocityPolicy):
    """Flow with a learned step for every length 1, 1/2, 1/4, ..."""

    name: ClassVar[str] = "shortcut"
    config_class = ShortcutConfig
    config: ShortcutConfig

    def time_inputs(self, t: Tensor, length: Tensor) -> Tensor:
        """Replace the shortest length by 0."""
        return super().time_inputs(t, torch.where(length <= 1 / self.config.max_steps, 0.0, length))

    def path(self, data: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Point at time `t` `(B,)` and velocity `(B, H, A)` of the line from `noise` to `data` with noise `delta`."""
        velocity = data - (1 - self.config.delta) * noise
        return noise + t[:, None, None] * velocity, velocity

    def matching_loss(self, features: Tensor, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Flow matching `(B, H)`: the part of the objective with d = 0."""
        x, velocity = self.path(data, noise, t)
        return self.reduce(self.velocity(features, x, t) - velocity)

    def training_target(self, features: Tensor, data: Tensor, noise: Tensor, generator: Randomness) -> TrainingTarget:
        """Flow matching on most rows, self-consistency on the others."""
        n = normal((len(data), 3), generator, data.device)
        uniform = torch.special.ndtr(n)
        octaves = math.log2(self.config.max_steps)
        exponent = (uniform[:, 2] * octaves).floor().clamp(max=octaves - 1)
        step = torch.exp2(-exponent)  # 1, 1/2, ..., 2 / max_steps
        start = ((uniform[:, 0] / step).floor() * step).minimum(1 - step)
        consistent = uniform[:, 1] < self.config.consistency_share
        t = torch.where(consistent, start, TIME_DISTRIBUTIONS[self.config.time_distribution](n[:, 0]))
        x, target = self.path(data, noise, t)
        rows = consistent.nonzero().flatten()
        if len(rows):
            halves = self.two_half_steps(features[rows], x[rows], t[rows], step[rows])
            target = target.index_copy(0, rows, halves.to(target.dtype))
        return TrainingTarget(x, t, torch.where(consistent, step, 0.0), target)

    @torch.no_grad()
    def two_half_steps(self, features: Tensor, x: Tensor, t: Tensor, step: Tensor) -> Tensor:
        """Average velocity `(B, H, A)` of two steps of half the length `step` `(B,)`, bounded."""
        half = step / 2
        first = self.average(features, x, t, half)
        middle = (x + half[:, None, None] * first).clamp(-SHORTCUT_BOUND, SHORTCUT_BOUND)
        second = self.average(features, middle, t + half, half)
        return ((first + second) / 2).clamp(-SHORTCUT_BOUND, SHORTCUT_BOUND)


DERIVATIVES = ("exact", "difference")
TIME_SCALE = 0.1  # factor on the time inputs of the network
DIFFERENCE = 1e-3  # time step of the finite difference


@dataclass(frozen=True)
class MeanFlowConfig(AverageVelocityConfig):
    """Architecture, sampler and objective of a `MeanFlowPolicy`."""

    steps: PositiveInt = 1  # K
    time_distribution: str = "logit_normal_data"  # of both times; published: logit-normal with more mass near the data
    flow_ratio: Fraction = 0.75  # fraction of the batch with a = b, which learns the flow
    adaptive_power: NonNegative = 1.0  # p of the weight 1 / (squared error + c)^p of each row; 0 is plain regression
    adaptive_floor: Positive = 0.01  # c of that weight
    derivative: str = "exact"  # exact (forward mode) | difference (for networks without forward mode)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.derivative not in DERIVATIVES:
            raise unknown_name("derivative", self.derivative, DERIVATIVES)


class MeanFlowPolicy(AverageVelocityPolicy):
    """Flow with a learned average velocity between any two times."""

    name: ClassVar[str] = "meanflow"
    config_class = MeanFlowConfig
    config: MeanFlowConfig

    def time_inputs(self, t: Tensor, length: Tensor) -> Tensor:
        """Both times, scaled so that the network is smooth in them."""
        return TIME_SCALE * super().time_inputs(t, length)

    def training_target(self, features: Tensor, data: Tensor, noise: Tensor, generator: Randomness) -> TrainingTarget:
        """The fixed point `v + (b - a) dm/da`, which is v where a = b."""
        n = normal((len(data), 3), generator, data.device)
        times = TIME_DISTRIBUTIONS[self.config.time_distribution](n[:, :2])
        start, end = times.amin(1), times.amax(1)
        instant = torch.special.ndtr(n[:, 2]) < self.config.flow_ratio
        length = torch.where(instant, 0.0, end - start)
        x, target = interpolate(noise, data, start[:, None, None]), data - noise
        rows = length.nonzero().flatten()
        if len(rows):
            tangent = target[rows]
            slope = self.total_derivative(features[rows], x[rows], start[rows], length[rows], tangent)
            corrected = tangent + length[rows, None, None] * slope
            target = target.index_copy(0, rows, corrected.to(target.dtype))
        return TrainingTarget(x, start, length, target)

    @torch.no_grad()
    def total_derivative(self, features: Tensor, x: Tensor, t: Tensor, length: Tensor, tangent: Tensor) -> Tensor:
        """Derivative `(B, H, A)` of the average velocity by the start `t`, along `tangent`, with fixed end.

        The end is `t + length`, so the length decreases at the rate at which the start increases.
        """

        def network(x: Tensor, t: Tensor, length: Tensor) -> Tensor:
            return self.average(features, x, t, length)

        ones = torch.ones_like(t)
        if self.config.derivative == "difference":
            features = features.float()  # used by `network`
            with full_precision(x.device):
                return central_difference(network, (x, t, length), (tangent, ones, -ones))
        with forward_mode():
            return torch.func.jvp(network, (x, t, length), (tangent, ones, -ones))[1]

    def reduce(self, error: Tensor, mask: Tensor | None = None) -> Tensor:
        """Squared error of the chunk, weighted so that rows of small and large error contribute about equally."""
        squared, steps = error.square().sum(-1), error.shape[1]  # (B, H)
        total = steps * chunk_mean(squared.detach(), mask)[:, None]  # the sum over the H steps, as in the paper
        return (total + self.config.adaptive_floor) ** -self.config.adaptive_power * squared * steps


def central_difference(
    network: Callable[..., Tensor], at: tuple[Tensor, ...], along: tuple[Tensor, ...], step: float = DIFFERENCE
) -> Tensor:
    """Directional derivative of `network` from two calls."""
    ahead, behind = (network(*(x + s * v for x, v in zip(at, along, strict=True))) for s in (step, -step))
    return (ahead.float() - behind.float()) / (2 * step)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast, because finite differences need full precision."""
    cudnn = torch.backends.cudnn
    exact = cudnn.flags(
        enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
    )
    with torch.autocast(device.type, enabled=False), exact:
        yield


@contextmanager
def forward_mode() -> Iterator[None]:
    """Use attention kernels with forward-mode derivatives, which fused kernels lack."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
