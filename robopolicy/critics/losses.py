"""Losses and weights of value learning, as pure functions: expectiles, advantage weights, conservative penalties."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Squared error `(...)` of `difference` = target - prediction, weighted `expectile` above and the rest below 0.

    0.5 fits half the mean squared error; towards 1 the minimiser rises to the largest target (Kostrikov et al. 2021).
    """
    weight = torch.where(difference > 0, expectile, 1 - expectile)
    return weight * difference.square()


def advantage_weight(advantage: Tensor, beta: float, largest: float) -> Tensor:
    """Imitation weight `(...)` exp(beta * advantage), at most `largest`."""
    return (beta * advantage).clamp(max=math.log(largest)).exp()


def calibrated(values: Tensor, returns: Tensor) -> Tensor:
    """Values `(M, B, C)` raised to the return to go `(B,)` that the data has shown; unknown (NaN) returns raise none.

    Where a value lies below the return it has no gradient: it is not pushed down any further (Nakamoto et al. 2023).
    """
    bound = torch.where(returns.isnan(), -torch.inf, returns)
    return torch.maximum(values, bound[:, None])


def conservative_penalty(data: Tensor, policy: Tensor, uniform: Tensor, returns: Tensor) -> Tensor:
    """How far `(M, B)` the soft maximum over sampled chunks exceeds the value of the data's chunk (CQL with Cal-QL).

    Args:
        data: (M, B) values of the chunks in the data.
        policy: (M, B, C) values of chunks from the policy; those alone are calibrated.
        uniform: (M, B, U) values of chunks drawn uniformly from the action space.
        returns: (B,) returns to go of the data, NaN where unknown.

    The soft maximum is the log of the mean exponential over all samples and the data's chunk, so that it is 0 where
    all values agree; there are no importance weights, and hence the policy needs no density.
    """
    values = torch.cat([calibrated(policy, returns), uniform, data.unsqueeze(-1)], -1)
    return values.logsumexp(-1) - math.log(values.shape[-1]) - data


def softmax_weights(values: Tensor, temperature: float) -> Tensor:
    """Probabilities `(..., C)` proportional to exp(value / temperature)."""
    return (values / temperature).softmax(-1)
