"""Noise schedules: how much noise each training level holds, and which levels a sampler visits.

Levels are counted as in the papers, 0 (almost clean) to T - 1 (almost pure noise); samplers run from high to low.
Tables are made on the CPU in double precision: differences of numbers near 1 decide about the last steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import unknown_name

MAX_BETA = 0.999  # the squared cosine ends in a beta of 1, at which nothing of the data would be left


def squared_cosine_betas(steps: int, start: float = 0.0, end: float = 0.0) -> Tensor:
    """Betas `(T,)` of Nichol and Dhariwal (2021); the range of the linear schedule does not concern them."""
    signal = [math.cos((i / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(steps + 1)]
    return torch.tensor(
        [min(1 - after / before, MAX_BETA) for before, after in pairwise(signal)],
        dtype=torch.float64,
        device="cpu",
    )


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
    """The level nearest to linear time `t` `(B,)`, between two levels in proportion to the log signal-to-noise ratio.

    Args:
        t: Linear time; beyond the first or last level it is moved there.
        level_times: Linear time `(T,)` of each level, falling.
        level_log_snr: log(signal power / noise power) `(T,)`, falling.

    Returns:
        Coefficients of data and noise `(B, 1, 1)` on the variance-preserving path, and the fractional level `(B,)`.
    """
    t = t.clamp(level_times[-1], level_times[0])
    rising = -level_log_snr
    wanted = -2 * torch.logit(t)
    upper = torch.searchsorted(rising, wanted).clamp(1, len(rising) - 1)
    share = (wanted - rising[upper - 1]) / (rising[upper] - rising[upper - 1])
    power = torch.hypot(t, 1 - t)  # not by way of alpha_bar, which rounds the last levels to a few digits
    return (t / power)[:, None, None], ((1 - t) / power)[:, None, None], upper - 1 + share


def _leading(levels: int, steps: int) -> list[int]:
    return [i * (levels // steps) for i in reversed(range(steps))]


def _trailing(levels: int, steps: int) -> list[int]:
    return (np.arange(levels, 0, -levels / steps)[:steps].round().astype(int) - 1).tolist()


def _linspace(levels: int, steps: int) -> list[int]:
    return np.linspace(0, levels - 1, steps).round()[::-1].astype(int).tolist()


SPACINGS: dict[str, Callable[[int, int], list[int]]] = {
    "leading": _leading,
    "trailing": _trailing,
    "linspace": _linspace,
}
"""Which of T levels a sampler of K steps visits, from high to low: ends at 0 | starts at T - 1 | both."""


def spaced_levels(spacing: str, levels: int, steps: int) -> list[int]:
    """Levels of a sampler with `steps` steps; all differ."""
    if spacing not in SPACINGS:
        raise unknown_name("level spacing", spacing, SPACINGS)
    return SPACINGS[spacing](levels, steps)


def karras_sigmas(steps: int, sigma_min: float, sigma_max: float, rho: float) -> Tensor:
    """Noise levels `(K + 1,)` of Karras et al. (2022) from `sigma_max` to `sigma_min`, then 0; float64."""
    ramp = torch.linspace(0, 1, steps, dtype=torch.float64, device="cpu")
    high, low = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return torch.cat([(high + ramp * (low - high)) ** rho, ramp.new_zeros(1)])
