"""MeanFlow policy: a network of average velocities, one call from noise to chunk (Geng et al. 2025).

The network `m(x, a, b)` predicts the mean velocity of the flow between times a <= b. Differentiating its definition
along the flow gives the identity `m = v + (b - a) dm/da`, in which everything is known but m: the total derivative
`dm/da` along the flow is one Jacobian-vector product of the network with tangents (v, 1, 0). Training regresses m on
the right-hand side, which carries no gradient, with `v = data - noise`; most rows have a = b and learn the flow itself.
Sampling takes K steps of 1/K, usually one.

Use it for one-call policies trained from demonstrations alone, without a teacher. Not with a network that is cheap to
call several times anyway: a plain flow trains faster and more stably.

Time runs from noise to data here, the other way round than in the paper, so the correction has the other sign and the
logit-normal law of the times the other mean. The adaptive weight draws chunks of few dimensions towards their modes;
where spread matters more than precision, set adaptive_power to 0 and time_law to uniform.

Deviations: the network is told times a tenth as large, as the fast waves of our embedding make `dm/da` so steep that
training can diverge; the product is computed for rows with a < b only, elsewhere it is multiplied by 0; padded steps of
a chunk count in the adaptive weight of their row (not in its loss).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from robopolicy.errors import unknown_name
from robopolicy.limits import Count, NotNegative, Positive, Share
from robopolicy.policies.heads.average_velocity import AverageVelocityConfig, AverageVelocityPolicy, Lesson
from robopolicy.policies.heads.generative import TIME_LAWS
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import interpolate

DERIVATIVES = ("exact", "difference")
TIME_SCALE = 0.1  # of what the network is told of times
DIFFERENCE = 1e-3  # time step of the finite difference


@dataclass(frozen=True)
class MeanFlowConfig(AverageVelocityConfig):
    """Architecture, sampler and objective of a `MeanFlowPolicy`."""

    steps: Count = 1  # K
    time_law: str = "logit_normal_data"  # of both times; the paper's: logit-normal with more mass near the data
    instant_share: Share = 0.75  # share of the batch with a = b, which learns the flow itself
    adaptive_power: NotNegative = 1.0  # p of the weight 1 / (squared error + c)^p of each row; 0 is plain regression
    adaptive_floor: Positive = 0.01  # c of that weight
    derivative: str = "exact"  # exact (forward mode) | difference (where the network has no forward mode)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.derivative not in DERIVATIVES:
            raise unknown_name("derivative", self.derivative, DERIVATIVES)


class MeanFlowPolicy(AverageVelocityPolicy):
    """Flow with a learned average velocity between any two times."""

    name: ClassVar[str] = "meanflow"
    config_class = MeanFlowConfig
    config: MeanFlowConfig

    def times_of(self, t: Tensor, length: Tensor) -> Tensor:
        """Both times, slowed down so that the network is smooth in them."""
        return TIME_SCALE * super().times_of(t, length)

    def lesson(self, features: Tensor, data: Tensor, noise: Tensor, generator: Randomness) -> Lesson:
        """The fixed point `v + (b - a) dm/da`, which is v where a = b."""
        n = normal((len(data), 3), generator, data.device)
        times = TIME_LAWS[self.config.time_law](n[:, :2])
        start, end = times.amin(1), times.amax(1)
        instant = torch.special.ndtr(n[:, 2]) < self.config.instant_share
        length = torch.where(instant, 0.0, end - start)
        x, target = interpolate(noise, data, start[:, None, None]), data - noise
        rows = length.nonzero().flatten()
        if len(rows):
            tangent = target[rows]
            slope = self.total_derivative(features[rows], x[rows], start[rows], length[rows], tangent)
            corrected = tangent + length[rows, None, None] * slope
            target = target.index_copy(0, rows, corrected.to(target.dtype))
        return Lesson(x, start, length, target)

    @torch.no_grad()
    def total_derivative(self, features: Tensor, x: Tensor, t: Tensor, length: Tensor, tangent: Tensor) -> Tensor:
        """Change `(B, H, A)` of the average velocity per unit of departure time `t`, along `tangent`, with fixed end.

        The end is `t + length`, so the length shrinks as fast as the departure moves.
        """

        def network(x: Tensor, t: Tensor, length: Tensor) -> Tensor:
            return self.average(features, x, t, length)

        ones = torch.ones_like(t)
        if self.config.derivative == "difference":
            features = features.float()  # which `network` reads when it is called
            with full_precision(x.device):
                return central_difference(network, (x, t, length), (tangent, ones, -ones))
        with forward_mode():
            return torch.func.jvp(network, (x, t, length), (tangent, ones, -ones))[1]

    def reduce(self, error: Tensor) -> Tensor:
        """Squared error of the chunk, weighted so that rows of small and large error pull about equally."""
        squared = error.square().sum(-1)  # (B, H)
        weight = (squared.detach().sum(1, keepdim=True) + self.config.adaptive_floor) ** -self.config.adaptive_power
        return weight * squared * error.shape[1]  # the mean over the H steps is their sum, as in the paper


def central_difference(
    network: Callable[..., Tensor], at: tuple[Tensor, ...], along: tuple[Tensor, ...], step: float = DIFFERENCE
) -> Tensor:
    """Directional derivative of `network` from two calls."""
    ahead, behind = (network(*(x + s * v for x, v in zip(at, along, strict=True))) for s in (step, -step))
    return (ahead.float() - behind.float()) / (2 * step)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products with all their digits, whatever autocast says: the last ones are what differences are made of."""
    cudnn = torch.backends.cudnn
    exact = cudnn.flags(
        enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
    )
    with torch.autocast(device.type, enabled=False), exact:
        yield


@contextmanager
def forward_mode() -> Iterator[None]:
    """Attention by kernels that can be differentiated in forward mode; the fused ones cannot."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
