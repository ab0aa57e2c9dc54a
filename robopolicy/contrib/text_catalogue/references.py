"""References made of other policies: tempered, mixed, and averaged in weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def average_weights(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """Weighted mean of the parameters of several policies; integers are those of the first.

    Source: SALSA, Chegini et al. 2024.

    Args:
        states: State dicts with the same keys and shapes.
        weights: One per state, normalised to sum to 1; None: equal.
    """
    if not states:
        raise ValueError("An average needs at least one policy.")
    shares = [1.0] * len(states) if weights is None else list(weights)
    if len(shares) != len(states) or sum(shares) <= 0:
        raise ValueError(
            f"An average of {len(states)} policies needs as many weights with a positive sum, got {shares}."
        )
    for state in states[1:]:
        if state.keys() != states[0].keys():
            raise ValueError("Averaged policies must have the same parameters.")
    total = sum(shares)

    def mean(key: str) -> Tensor:
        if not states[0][key].is_floating_point():
            return states[0][key].clone()
        return torch.stack([share / total * state[key] for share, state in zip(shares, states, strict=True)]).sum(0)

    return {key: mean(key) for key in states[0]}


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities `(..., V)` of the policy sharpened (temperature below 1) or flattened (above 1)."""
    return (logits / temperature).log_softmax(-1)


def geometric_mixture(first: Tensor, second: Tensor, share: float) -> Tensor:
    """Log-probabilities `(..., V)` of the normalised `first^(1 - share) second^share`, Nash-MD's opponent."""
    return ((1.0 - share) * first + share * second).log_softmax(-1)
