"""Reference policies: tempered, mixed, or with averaged weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def average_weights(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """Average the parameters of several policies; integer tensors are copied from the first.

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
            f"Averaging {len(states)} policies requires as many weights with a positive sum, got {shares}."
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
    """Compute log-probabilities `(..., V)` at a temperature."""
    return (logits / temperature).log_softmax(-1)


def geometric_mixture(first: Tensor, second: Tensor, share: float) -> Tensor:
    """Compute log-probabilities `(..., V)` of the normalised `first^(1 - share) second^share`, Nash-MD's opponent."""
    return ((1.0 - share) * first + share * second).log_softmax(-1)
