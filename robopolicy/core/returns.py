"""Returns and advantages over time: GAE, chunk-aware discounts and nested discounts.

Time is the first dimension, `(T, N)`; token rows `(N, T)` have their own entry, `sequence_gae`. One rule everywhere:
terminated cuts the bootstrap, truncated bootstraps from the true successor, both cut the trace. The successor of an
entry is the observation its own action led to, never the first one after an automatic reset.
"""

from __future__ import annotations

import torch
from torch import Tensor

DISCOUNT_UNITS = ("step", "chunk")


def chunk_discount(gamma: float, steps: Tensor, unit: str = "step") -> Tensor:
    """Discount between one chunk decision and the next.

    Args:
        gamma: Discount per control step (`unit="step"`) or per chunk (`unit="chunk"`, as DPPO, ReinFlow and DSRL).
        steps: (T, N) control steps really executed, fewer than the chunk when an episode ended inside it.
        unit: "step" gives `gamma ** steps`, "chunk" gives `gamma`.
    """
    if unit == "step":
        return torch.pow(gamma, steps.to(torch.get_default_dtype()))
    if unit == "chunk":
        return torch.full_like(steps, gamma, dtype=torch.get_default_dtype())
    raise ValueError(f"Discount unit must be one of {DISCOUNT_UNITS}, got {unit!r}.")


def successor_values(value: Tensor, last_value: Tensor, bootstrap: Tensor, final_value: Tensor) -> Tensor:
    """Value of the true successor of every entry, the `next_value` of `gae`.

    Args:
        value: (T, N) value of the observation acted on.
        last_value: (N,) value of the observation after the last decision.
        bootstrap: (T, N) bool, truncated and not terminated.
        final_value: (M,) values of the last observations of the M entries that bootstrap, row-major.
    """
    count = int(bootstrap.sum())
    if final_value.shape != (count,):
        raise ValueError(f"{count} entries to bootstrap need final_value of shape ({count},), got {final_value.shape}.")
    successor = torch.cat([value[1:], last_value.unsqueeze(0)])
    successor[bootstrap] = final_value
    return successor


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
        reward: (T, N); for chunks the reward summed over the executed steps.
        value: (T, N) value of the observation acted on.
        next_value: (T, N) value of the true successor (`final_obs` where an episode ended); see `successor_values`.
            Ignored where terminated, so it may hold anything there.
        terminated: (T, N) bool, cuts bootstrap and trace.
        truncated: (T, N) bool, bootstraps and cuts the trace; terminated wins where both are set.
        discount: A number, or (T, N) for chunks of differing length, see `chunk_discount`.
        lam: A number, or (T, N) for two clocks, see `two_clock`.

    Returns:
        Advantages and lambda returns (advantage + value), both (T, N).
    """
    shape = reward.shape
    for name, tensor in {
        "value": value,
        "next_value": next_value,
        "terminated": terminated,
        "truncated": truncated,
    }.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must have the shape of reward, {tuple(shape)}, got {tuple(tensor.shape)}.")
    bootstrap = next_value.masked_fill(terminated, 0.0)
    residual = reward + discount * bootstrap - value
    decay = torch.as_tensor(discount * lam, dtype=residual.dtype, device=residual.device).expand(shape)
    advantage = _reverse_scan(residual, decay.masked_fill(terminated | truncated, 0.0))
    return advantage, advantage + value


def nested_discount(unit: Tensor, outer: float, inner: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Discount per decision on two levels: `outer` where a unit ends, `inner` inside it.

    With `outer = gamma`, `inner = 1` the decisions of one action or chunk (tokens, denoising steps) share one moment
    of time (POAD, Wen et al. 2024); `inner = outer` is the ordinary single clock.

    Args:
        unit: (N, T) ids of turns or chunks, consecutive along a row.
        outer: Factor from the last decision of a unit to the next unit.
        inner: Factor between decisions of one unit.
        mask: (N, T) bool, entries that are decisions; others are skipped.

    Returns:
        (N, T) factors, for the discount or the lambda of `sequence_gae`.
    """
    valid = torch.ones_like(unit, dtype=torch.bool) if mask is None else mask.bool()
    ends = torch.ones_like(valid)
    following = torch.full_like(unit[:, 0], -1)
    seen = torch.zeros_like(valid[:, 0])
    for t in reversed(range(unit.shape[1])):
        ends[:, t] = ~seen | (unit[:, t] != following)
        following = torch.where(valid[:, t], unit[:, t], following)
        seen = seen | valid[:, t]
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

    Masked entries are skipped: the result on a row equals the result on the row without them. Rewards that fall on
    skipped entries count for nothing; place them on a decision.

    Args:
        reward: (N, T).
        value: (N, T).
        discount: A number or (N, T): factor from a decision to the next one of its row, see `two_clock`.
        lam: A number or (N, T), likewise.
        mask: (N, T) bool, True at decisions.
        last_value: (N,) bootstrap after the last decision of a row that was cut off; rows end terminated without it.

    Returns:
        Advantages and lambda returns, both (N, T), zero at entries that are not decisions.
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
