"""The noise path that all generative heads share: time 0 is noise, time 1 is data, velocity = data - noise.

Any Gaussian path `x_t = a * data + b * noise` (diffusion, EDM, flow) lies on the linear one after division by `a + b`.
A model of any parameterisation is read through `estimate`, which turns its prediction into data and noise exactly.
Coefficients `a` and `b` broadcast against `x_t`; give them shape `(B, 1, 1)` for one time per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.errors import unknown_name


@dataclass(frozen=True)
class Estimate:
    """What a model believes at one point of its path."""

    data: Tensor  # expected clean sample
    noise: Tensor  # expected noise

    @property
    def velocity(self) -> Tensor:
        """Velocity of the linear path, data - noise."""
        return self.data - self.noise


def interpolate(noise: Tensor, data: Tensor, t: Tensor) -> Tensor:
    """Point of the linear path at `t`: `(1 - t) * noise + t * data`."""
    return noise + t * (data - noise)


def vp_coefficients(alpha_bar: Tensor) -> tuple[Tensor, Tensor]:
    """(a, b) of the variance-preserving path (DDPM, DDIM) at cumulative signal level `alpha_bar`."""
    return alpha_bar.sqrt(), (1 - alpha_bar).sqrt()


def edm_sigma(t: Tensor) -> Tensor:
    """Noise level of EDM at linear time `t` in (0, 1]."""
    return (1 - t) / t


def _from_noise(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> Estimate:
    return Estimate((x_t - b * y) / a, y)


def _from_data(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> Estimate:
    return Estimate(y, (x_t - a * y) / b)


def _from_velocity(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> Estimate:
    return Estimate((x_t + b * y) / (a + b), (x_t - a * y) / (a + b))


def _from_v(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> Estimate:
    power = a.square() + b.square()
    return Estimate((a * x_t - b * y) / power, (b * x_t + a * y) / power)


def _from_score(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> Estimate:
    return _from_noise(-b * y, x_t, a, b)


_READERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Estimate]] = {
    "noise": _from_noise,
    "data": _from_data,
    "velocity": _from_velocity,
    "v": _from_v,
    "score": _from_score,
}

_WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "noise": lambda data, noise, a, b: noise,
    "data": lambda data, noise, a, b: data,
    "velocity": lambda data, noise, a, b: data - noise,
    "v": lambda data, noise, a, b: a * noise - b * data,
    "score": lambda data, noise, a, b: -noise / b,
}


def estimate(kind: str, prediction: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> Estimate:
    """Read a model's `prediction` at `x_t = a * data + b * noise`.

    Args:
        kind: "noise" (epsilon), "data" (sample), "velocity" (data - noise), "v" (a * noise - b * data) or "score".
        prediction: Output of the model, shape of `x_t`.
        x_t: Point of the model's own path.
        a: Data coefficient; must not be 0 for "noise" and "score".
        b: Noise coefficient; must not be 0 for "data".
    """
    if kind not in _READERS:
        raise unknown_name("prediction", kind, _READERS)
    return _READERS[kind](prediction, x_t, a, b)


def prediction_target(kind: str, data: Tensor, noise: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What a perfect model of `kind` predicts for this pair; inverse of `estimate`."""
    if kind not in _WRITERS:
        raise unknown_name("prediction", kind, _WRITERS)
    return _WRITERS[kind](data, noise, a, b)


def left_grid(steps: int) -> Tensor:
    """Times `{0, 1/K, ..., (K-1)/K}` `(K,)` at which Euler steps of size 1/K are taken.

    The only grid of the flow heads: sampling and scoring both index it.
    """
    return torch.arange(steps) / steps


def step_index(k: int, x: Tensor) -> Tensor:
    """Sampler step `k` `(1,)` of all iterates `x` `(B, H, A)`: what depends on the step alone is computed once."""
    return torch.full((1,), k, device=x.device)
