"""Diagnostics of a run: coverage, entropy, how far the data carry, whom an update hurts. None has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def pass_at_k(successes: Tensor, samples: Tensor | int, k: int) -> Tensor:
    """Unbiased chance `(P,)` that at least one of k samples succeeds, from the count among n >= k samples.

    `1 - C(n - c, k) / C(n, k)`, as a product that neither over- nor underflows.
    """
    n = torch.as_tensor(samples, dtype=torch.float64, device=successes.device).expand_as(successes)  # pyright: ignore[reportUnknownMemberType]
    if k < 1 or bool((n < k).any()):
        raise ValueError(f"pass@{k} needs at least {max(k, 1)} samples of every prompt, got {int(n.min())}.")
    failures = n - successes.double()
    steps = torch.arange(k, dtype=torch.float64, device=successes.device)
    all_fail = ((failures.unsqueeze(-1) - steps).clamp(min=0.0) / (n.unsqueeze(-1) - steps)).prod(-1)
    return 1.0 - all_fail
