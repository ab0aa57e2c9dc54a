"""Log-probabilities and entropies of tokens from the last hidden states, in blocks of rows and of the vocabulary.

Logits of the whole batch are never there, neither forward nor backward: a block of at most `ROWS` x `COLUMNS` float32
numbers is computed, used and computed again for the gradient.
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
    """Log-probability and entropy of softmax((hidden weight^T + bias) / temperature).

    Args:
        hidden: (M, D) last hidden states.
        weight: (V, D) of the output layer, in any float type; products are taken in float32.
        bias: (V,) or None.
        targets: (M,) int64 tokens to score.
        temperature: (M,) positive.

    Returns:
        `(M,)` float32 log-probabilities and `(M,)` entropies [nats], differentiable in all but the temperature.
    """
    bias = weight.new_zeros(0) if bias is None else bias
    logp, entropy = _TokenScores.apply(hidden, weight, bias, targets, temperature)  # type: ignore[misc]
    return logp, entropy


def supported_scores(logits: Tensor, support: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy `(M,)` [nats] of the softmax over a support; for small vocabularies, all at once.

    Args:
        logits: (M, V), the temperature included.
        support: (M, V) bool.
        targets: (M,) int64 tokens to score, of the support.
    """
    logp = masked_log_softmax(logits, support)
    inside = logp.masked_fill(~support, 0.0)
    return logp.gather(1, targets[:, None]).squeeze(1), -(inside.exp().masked_fill(~support, 0.0) * inside).sum(1)


def collisions(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor, draws: int = 2) -> Tensor:
    """Probability that all tokens drawn from softmax((hidden weight^T + bias) / temperature) agree.

    Args:
        hidden: (M, D) last hidden states.
        weight: (V, D) of the output layer.
        bias: (V,) or None.
        temperature: (M,) positive.
        draws: How many are drawn.

    Returns:
        `(M,)` in (0, 1], without gradient.
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
            # Streaming log-sum-exp: `peak`, sum of exp(logit - peak) and of exp(logit - peak) * logit.
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
        wants = ctx.needs_input_grad
        into_hidden = torch.zeros_like(hidden, dtype=norm.dtype)
        into_weight = torch.zeros_like(weight, dtype=norm.dtype) if wants[1] else None
        into_bias = torch.zeros_like(bias, dtype=norm.dtype) if wants[2] and len(bias) else None
        for rows in _blocks(len(hidden), ROWS):
            for columns in _blocks(len(weight), COLUMNS):
                logits = _logits(hidden[rows], weight, bias, temperature[rows], columns)
                log_p = logits - norm[rows, None]
                p = log_p.exp()
                # d logp / d logit_j = 1[j = target] - p_j, d entropy / d logit_j = -p_j (log p_j + entropy)
                inner = -p * (grads[0][rows, None] + grads[1][rows, None] * (log_p + entropy[rows, None]))
                place = targets[rows] - columns.start
                inside = (place >= 0) & (place < logits.shape[1])
                inner[inside, place[inside]] += grads[0][rows][inside]
                inner /= temperature[rows, None]
                into_hidden[rows] += inner @ weight[columns].to(norm.dtype)
                if into_weight is not None:
                    into_weight[columns] += inner.T @ hidden[rows].to(norm.dtype)
                if into_bias is not None:
                    into_bias[columns] += inner.sum(0)
        return (
            into_hidden.to(hidden.dtype) if wants[0] else None,
            None if into_weight is None else into_weight.to(weight.dtype),
            None if into_bias is None else into_bias.to(bias.dtype),
            None,
            None,
        )


def _float(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor, temperature: Tensor, columns: slice) -> Tensor:
    """A block of logits in float32, or float64 where the hidden states are."""
    kind = _float(hidden)
    logits = hidden.to(kind) @ weight[columns].to(kind).T
    if len(bias):
        logits = logits + bias[columns].to(kind)
    return logits / temperature.to(kind)[:, None]


def _blocks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
