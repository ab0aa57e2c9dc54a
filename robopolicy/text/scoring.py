"""Log-probabilities and entropies of tokens from the last hidden states, in blocks of rows and of the vocabulary.

The logits of the whole batch are never in memory: blocks of at most `ROWS` x `COLUMNS` float32 numbers are computed,
reduced, and computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from robopolicy.text.generation import masked_log_softmax

ROWS, COLUMNS = 1024, 8192  # of a block of logits: 32 MiB


def token_scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute log-probability and entropy of softmax((hidden weight^T + bias) / temperature).

    Args:
        hidden: (M, D) last hidden states.
        weight: (V, D) of the output layer, in any float type; products are computed in float32.
        bias: (V,) or None.
        targets: (M,) int64 tokens to score.
        temperature: (M,) positive.

    Returns:
        `(M,)` float32 log-probabilities and `(M,)` entropies [nats], not differentiable in the temperature.
    """
    bias = weight.new_zeros(0) if bias is None else bias
    logp, entropy = _TokenScores.apply(hidden, weight, bias, targets, temperature)  # type: ignore[misc]
    return logp, entropy


def supported_scores(logits: Tensor, support: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probability and entropy `(M,)` [nats] of the softmax over a support, for small vocabularies.

    Args:
        logits: (M, V), divided by the temperature.
        support: (M, V) bool.
        targets: (M,) int64 tokens of the support.
    """
    logp = masked_log_softmax(logits, support)
    inside = logp.masked_fill(~support, 0.0)
    return logp.gather(1, targets[:, None]).squeeze(1), -(inside.exp().masked_fill(~support, 0.0) * inside).sum(1)


def collisions(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, draws: int = 2) -> Tensor:
    """Compute the probability `(M,)` that `draws` tokens from softmax((hidden weight^T + bias) / temperature) agree.

    Arguments as in `token_scores`; there is no gradient.
    """
    bias = weight.new_zeros(0) if bias is None else bias
    result = hidden.new_empty(len(hidden), dtype=_float(hidden))
    for rows in _blocks(len(hidden), ROWS):
        single, power = (result.new_full((rows.stop - rows.start,), -torch.inf) for _ in range(2))
        for columns in _blocks(len(weight), COLUMNS):
            logits = _logits(hidden[rows], weight, bias, temperature[rows], columns)
            single = torch.logaddexp(single, logits.logsumexp(1))
            power = torch.logaddexp(power, (draws * logits).logsumexp(1))
        result[rows] = (power - draws * single).exp()
    return result


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, temperature: Tensor
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, norm = (hidden.new_empty(len(hidden), dtype=_float(hidden)) for _ in range(3))
        for rows in _blocks(len(hidden), ROWS):
            # Streaming log-sum-exp: `peak`, sums of exp(logit - peak) and of exp(logit - peak) * logit.
            count = rows.stop - rows.start
            peak = norm.new_full((count,), -torch.inf)
            total, weighted, chosen = (norm.new_zeros(count) for _ in range(3))
            for columns in _blocks(len(weight), COLUMNS):
                logits = _logits(hidden[rows], weight, bias, temperature[rows], columns)
                higher = torch.maximum(peak, logits.amax(1))
                shrink = (peak - higher).exp()
                mass = (logits - higher[:, None]).exp()
                total = total * shrink + mass.sum(1)
                weighted = weighted * shrink + (mass * logits).sum(1)
                peak = higher
                place = targets[rows] - columns.start
                inside = (place >= 0) & (place < logits.shape[1])
                found = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
                chosen = torch.where(inside, found, chosen)
            norm[rows] = peak + total.log()
            logp[rows] = chosen - norm[rows]
            entropy[rows] = norm[rows] - weighted / total
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, norm, entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, norm, entropy = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_hidden = torch.zeros_like(hidden, dtype=norm.dtype)
        grad_weight = torch.zeros_like(weight, dtype=norm.dtype) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=norm.dtype) if needs[2] and len(bias) else None
        for rows in _blocks(len(hidden), ROWS):
            for columns in _blocks(len(weight), COLUMNS):
                logits = _logits(hidden[rows], weight, bias, temperature[rows], columns)
                log_p = logits - norm[rows, None]
                p = log_p.exp()
                # d logp / d logit_j = 1[j = target] - p_j, d entropy / d logit_j = -p_j (log p_j + entropy)
                inner = -p * (grads[0][rows, None] + grads[1][rows, None] * (log_p + entropy[rows, None]))
                place = targets[rows] - columns.start
                inside = (place >= 0) & (place < logits.shape[1])
                place = place.clamp(0, logits.shape[1] - 1)[:, None]
                inner.scatter_add_(1, place, (grads[0][rows] * inside)[:, None])
                inner /= temperature[rows, None]
                grad_hidden[rows] += inner @ weight[columns].to(norm.dtype)
                if grad_weight is not None:
                    grad_weight[columns] += inner.T @ hidden[rows].to(norm.dtype)
                if grad_bias is not None:
                    grad_bias[columns] += inner.sum(0)
        return (
            grad_hidden.to(hidden.dtype) if needs[0] else None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _float(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor, temperature: Tensor, columns: slice) -> Tensor:
    """Compute a block of logits in float32, or in float64 for float64 hidden states."""
    dtype = _float(hidden)
    logits = hidden.to(dtype) @ weight[columns].to(dtype).T
    if len(bias):
        logits = logits + bias[columns].to(dtype)
    return logits / temperature.to(dtype)[:, None]


def _blocks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
