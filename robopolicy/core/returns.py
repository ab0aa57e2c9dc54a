"""Returns and advantages over time: GAE, chunk-aware discounts and nested discounts.

Time is the first dimension, `(T, N)`, except in `sequence_gae` for token rows `(N, T)`. `terminated` cuts the
bootstrap, `truncated` bootstraps from the true successor, and both cut the trace. The true successor is the observation
that results from the entry's own action, never the first observation after an automatic reset.
"""

from __future__ import annotations

import torch
from torch import Tensor

DISCOUNT_UNITS = ("step", "chunk")


def chunk_discount(gamma: float, steps: Tensor, unit: str = "step") -> Tensor:
    """Discount (T, N) between one chunk decision and the next, after `steps` (T, N) executed control steps.

    It is `gamma ** steps` for unit "step" and `gamma` for unit "chunk" (as in DPPO, ReinFlow and DSRL).
    """
    if unit == "step":
        return torch.pow(gamma, steps.to(torch.get_default_dtype()))
    if unit == "chunk":
        return torch.full_like(steps, gamma, dtype=torch.get_default_dtype())
    raise ValueError(f"Discount unit must be one of {DISCOUNT_UNITS}, got {unit!r}.")


def successor_values(value: Tensor, last_value: Tensor, bootstrap: Tensor, final_value: Tensor) -> Tensor:
    """Value of the true successor of every entry (T, N), the `next_value` of `gae`.

    `last_value` (N,) is of the observations after the last decisions, `final_value` (M,) of the last observations of
    the M entries where `bootstrap` (truncated and not terminated) is on, row-major.
    """
    if bootstrap.device.type == "cpu" and final_value.shape != (count := int(bootstrap.sum()),):  # a device would wait
        raise ValueError(f"{count} entries to bootstrap need final_value of shape ({count},), got {final_value.shape}.")
    return torch.cat([value[1:], last_value.unsqueeze(0)]).masked_scatter(bootstrap, final_value)


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    discount: float | Tensor,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation that bootstraps at truncation.

    Args:
        reward: (T, N); for chunks the sum over the executed steps.
        value: (T, N) value of the current observation.
        next_value: (T, N) value of the true successor (`final_obs` where an episode ended), see `successor_values`;
            ignored where terminated.
        terminated: (T, N) bool, cuts bootstrap and trace.
        truncated: (T, N) bool, bootstraps and cuts the trace; terminated has precedence.
        discount: A number, or (T, N) for chunks of different lengths, see `chunk_discount`.
        lam: A number, or (T, N).

    Returns:
        Advantages and lambda returns (advantage + value), both (T, N).
    """
    shape = reward.shape
    shaped = {"value": value, "next_value": next_value, "terminated": terminated, "truncated": truncated}
    for name, tensor in shaped.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must have the shape of reward, {tuple(shape)}, got {tuple(tensor.shape)}.")
    bootstrap = next_value.masked_fill(terminated, 0.0)
    residual = reward + discount * bootstrap - value
    decay = torch.as_tensor(discount * lam, dtype=residual.dtype, device=residual.device).expand(shape)
    advantage = _reverse_scan(residual, decay.masked_fill(terminated | truncated, 0.0))
    return advantage, advantage + value


def nested_discount(unit: Tensor, outer: float, inner: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Discount or lambda per decision (N, T) on two levels: `outer` where a unit ends, `inner` inside it.

    With `outer = gamma`, `inner = 1` the decisions of one action or chunk (tokens, denoising steps) share one time step
    (POAD, Wen et al. 2024). `unit` (N, T) has ids of turns or chunks, consecutive along a row; entries where `mask`
    (N, T) is off are skipped.
    """
    valid = torch.ones_like(unit, dtype=torch.bool) if mask is None else mask.bool()
    ends = torch.ones_like(valid)
    following = torch.full_like(unit[:, 0], -1)
    has_next = torch.zeros_like(valid[:, 0])
    for t in reversed(range(unit.shape[1])):
        ends[:, t] = ~has_next | (unit[:, t] != following)
        following = torch.where(valid[:, t], unit[:, t], following)
        has_next = has_next | valid[:, t]
    return torch.where(ends, outer, inner)


def sequence_gae(
    reward: Tensor,
    value: Tensor,
    discount: float | Tensor,
    lam: float | Tensor,
    mask: Tensor | None = None,
    last_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE along rows in which only some entries are decisions (prompt, tool output and padding are not).

    Masked entries are skipped, as if the row did not contain them; their rewards are ignored. `discount` and `lam` are
    numbers or (N, T), see `nested_discount`. `last_value` (N,) is the bootstrap after the last decision of truncated
    rows; without it rows end terminated. Returns advantages and lambda returns, both (N, T), 0 at masked entries.
    """
    rows, length = reward.shape
    gamma = torch.as_tensor(discount, dtype=reward.dtype, device=reward.device).expand(rows, length)
    trace = gamma * lam
    valid = torch.ones_like(reward, dtype=torch.bool) if mask is None else mask.bool()
    following = torch.zeros_like(reward[:, 0]) if last_value is None else last_value
    running = torch.zeros_like(reward[:, 0])
    advantage = torch.zeros_like(reward)
    for t in reversed(range(length)):
        residual = reward[:, t] + gamma[:, t] * following - value[:, t]
        running = torch.where(valid[:, t], residual + trace[:, t] * running, running)
        following = torch.where(valid[:, t], value[:, t], following)
        advantage[:, t] = torch.where(valid[:, t], running, 0.0)
    return advantage, torch.where(valid, advantage + value, 0.0)


def _reverse_scan(term: Tensor, decay: Tensor) -> Tensor:
    """Solve y[t] = term[t] + decay[t] * y[t + 1] backwards in time, with y[T] = 0."""
    running = torch.zeros_like(term[0])
    results: list[Tensor] = []
    for now, factor in zip(reversed(term.unbind(0)), reversed(decay.unbind(0)), strict=True):
        running = torch.addcmul(now, factor, running)
        results.append(running)
    return torch.stack(results[::-1])
