"""Noise path of all generative heads: time 0 is noise, time 1 is data, velocity = data - noise.

Any Gaussian path `x_t = a * data + b * noise` (diffusion, EDM, flow) is the linear path after division by `a + b`.
`estimate` converts the prediction of any parameterisation to data and noise exactly. Coefficients `a` and `b` broadcast
against `x_t`; use shape `(B, 1, 1)` for one time per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import unknown_name
from robopolicy.policies.base import Observation, Policy


@dataclass(frozen=True)
class PathEstimate:
    """Data and noise estimates of a model at one point of its path."""

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


def _from_noise(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
    return PathEstimate((x_t - b * y) / a, y)


def _from_data(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
    return PathEstimate(y, (x_t - a * y) / b)


def _from_velocity(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
    return PathEstimate((x_t + b * y) / (a + b), (x_t - a * y) / (a + b))


def _from_v(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
    power = a.square() + b.square()
    return PathEstimate((a * x_t - b * y) / power, (b * x_t + a * y) / power)


def _from_score(y: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
    return _from_noise(-b * y, x_t, a, b)


_ESTIMATES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], PathEstimate]] = {
    "noise": _from_noise,
    "data": _from_data,
    "velocity": _from_velocity,
    "v": _from_v,
    "score": _from_score,
}

_TARGETS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "noise": lambda data, noise, a, b: noise,
    "data": lambda data, noise, a, b: data,
    "velocity": lambda data, noise, a, b: data - noise,
    "v": lambda data, noise, a, b: a * noise - b * data,
    "score": lambda data, noise, a, b: -noise / b,
}


def estimate(kind: str, prediction: Tensor, x_t: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
    """Convert a model's `prediction` at `x_t = a * data + b * noise` to data and noise.

    `kind` is "noise" (epsilon), "data" (sample), "velocity" (data - noise), "v" (a * noise - b * data) or "score". The
    data coefficient `a` must not be 0 for "noise" and "score", the noise coefficient `b` must not be 0 for "data".
    """
    if kind not in _ESTIMATES:
        raise unknown_name("prediction", kind, _ESTIMATES)
    return _ESTIMATES[kind](prediction, x_t, a, b)


def prediction_target(kind: str, data: Tensor, noise: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Prediction of a perfect model of `kind` for this pair; inverse of `estimate`."""
    if kind not in _TARGETS:
        raise unknown_name("prediction", kind, _TARGETS)
    return _TARGETS[kind](data, noise, a, b)


def left_grid(steps: int) -> Tensor:
    """Times `{0, 1/K, ..., (K-1)/K}` `(K,)` of Euler steps of size 1/K, for sampling and scoring of flow heads."""
    return torch.arange(steps) / steps


def step_index(k: int, x: Tensor) -> Tensor:
    """Sampler step `k` `(1,)` for all iterates `x` `(B, H, A)`, so that step-dependent values are computed once."""
    return torch.full((1,), k, device=x.device)


@torch.no_grad()
def ode_step(policy: Policy, obs: Observation, x: Tensor, t: Tensor, to: Tensor) -> Tensor:
    """Point `(B, H, A)` at time `to` `(B,)` of the trajectory through `x` at time `t` `(B,)`, by one Heun step.

    A step that ends at 1 is an Euler step, as the field is not trained at time 1.
    """
    width = (to - t)[:, None, None]
    first = policy.field(obs, x, t)
    if to.device.type == "cpu" and bool((to >= 1).all()):  # a device would wait in every step
        return x + width * first
    second = policy.field(obs, x + width * first, to)
    second = torch.where((to < 1)[:, None, None], second, first)
    return x + width * (first + second) / 2


def ode_solve(policy: Policy, obs: Observation, noise: Tensor, steps: int) -> Tensor:
    """Data `(B, H, A)` at the end of the trajectories from `noise`, in normalised units without clipping."""
    x, times = noise, torch.linspace(0, 1, steps + 1, device=noise.device)
    for t, to in pairwise(times):
        x = ode_step(policy, obs, x, t.expand(len(x)), to.expand(len(x)))
    return x


MAX_BETA = 0.999  # the squared cosine ends with a beta of 1, which would remove the data


def squared_cosine_betas(steps: int, start: float = 0.0, end: float = 0.0) -> Tensor:
    """Betas `(T,)` of Nichol and Dhariwal (2021); `start` and `end` are not used."""
    signal = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
    betas = [min(1 - after / before, MAX_BETA) for before, after in pairwise(signal)]
    return torch.tensor(betas, dtype=torch.float64, device="cpu")


def linear_betas(steps: int, start: float, end: float) -> Tensor:
    """Betas `(T,)` of Ho et al. (2020)."""
    return torch.linspace(start, end, steps, dtype=torch.float64, device="cpu")


BETAS: dict[str, Callable[[int, float, float], Tensor]] = {
    "squared_cosine": squared_cosine_betas,
    "linear": linear_betas,
}
"""Noise added by each training level, given T and the range of the linear schedule."""


def alpha_bars(schedule: str, steps: int, start: float, end: float) -> Tensor:
    """Cumulative signal level `(T,)` of every training level, float64."""
    if schedule not in BETAS:
        raise unknown_name("beta schedule", schedule, BETAS)
    return (1 - BETAS[schedule](steps, start, end)).cumprod(0)


def level_at(t: Tensor, level_times: Tensor, level_log_snr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Level nearest to linear time `t` `(B,)`, interpolated between levels in the log signal-to-noise ratio.

    `level_times` and `level_log_snr` `(T,)` are falling; `t` is clamped to them. Returns the coefficients of data and
    noise `(B, 1, 1)` on the variance-preserving path, and the fractional level `(B,)`.
    """
    t = t.clamp(level_times[-1], level_times[0])
    rising = -level_log_snr
    target = -2 * torch.logit(t)
    upper = torch.searchsorted(rising, target).clamp(1, len(rising) - 1)
    fraction = (target - rising[upper - 1]) / (rising[upper] - rising[upper - 1])
    power = torch.hypot(t, 1 - t)  # alpha_bar would round the last levels to a few digits
    return (t / power)[:, None, None], ((1 - t) / power)[:, None, None], upper - 1 + fraction


SPACINGS: dict[str, Callable[[int, int], list[int]]] = {
    "leading": lambda levels, steps: [i * (levels // steps) for i in reversed(range(steps))],
    "trailing": lambda levels, steps: (np.arange(levels, 0, -levels / steps)[:steps].round().astype(int) - 1).tolist(),
    "linspace": lambda levels, steps: np.linspace(0, levels - 1, steps).round()[::-1].astype(int).tolist(),
}
"""Levels of a sampler of K steps out of T, from high to low: ends at 0 | starts at T - 1 | both."""


def spaced_levels(spacing: str, levels: int, steps: int) -> list[int]:
    """Levels of a sampler with `steps` different steps."""
    if spacing not in SPACINGS:
        raise unknown_name("level spacing", spacing, SPACINGS)
    return SPACINGS[spacing](levels, steps)


def karras_sigmas(steps: int, sigma_min: float, sigma_max: float, rho: float) -> Tensor:
    """Noise levels `(K + 1,)` of Karras et al. (2022) from `sigma_max` to `sigma_min`, then 0; float64."""
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64, device="cpu")
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return torch.cat([(high + ramp * (low - high)) ** rho, ramp.new_zeros(1)])
