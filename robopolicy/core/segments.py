"""Statistics over segments, the sets of entries that share an id."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor


class Segments:
    """Weighted entries grouped by id; entries of weight 0 receive the statistics but do not enter them.

    Per-segment results have shape `(S,)`; `broadcast` maps them to the shape of the entries.
    """

    def __init__(self, ids: Tensor, weight: Tensor) -> None:
        """Group entries by int `ids`, broadcastable to the bool or float `weight` `(N, T)` or `(N, 1)`."""
        unique = torch.unique(ids, return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        distinct, index = cast(tuple[Tensor, Tensor], unique)
        self.size = int(distinct.numel())
        self.index = index.view(ids.shape).expand(weight.shape)
        self.enters = weight > 0
        self.weight = weight if weight.is_floating_point() else weight.to(torch.get_default_dtype())
        self._total = self._add(self.weight)  # (S,) float64
        self.count = self._total.to(self.weight.dtype)  # (S,) total weight; the number of entries for a bool weight

    def broadcast(self, statistic: Tensor) -> Tensor:
        """Map a per-segment statistic `(S,)` to every entry."""
        return statistic[self.index]

    def sum(self, entries: Tensor) -> Tensor:
        """Weighted sum `(S,)`; entries of weight 0 may be NaN."""
        return self._exact_sum(entries).to(entries.dtype)

    def mean(self, entries: Tensor) -> Tensor:
        """Weighted mean `(S,)`; 0 for an empty segment, and exact if all entries are equal."""
        return (self._exact_sum(entries) / torch.where(self.count > 0, self._total, 1.0)).to(entries.dtype)

    def std(self, entries: Tensor, *, unbiased: bool = True) -> Tensor:
        """Standard deviation `(S,)`; 1 for fewer than two entries."""
        deviation = entries - self.broadcast(self.mean(entries))
        degrees = self.count - 1.0 if unbiased else self.count
        undefined = self.count < 1.5
        return (self.sum(deviation**2) / torch.where(undefined, 1.0, degrees)).sqrt().masked_fill(undefined, 1.0)

    def largest(self, entries: Tensor) -> Tensor:
        """Largest entry `(S,)`; -inf for an empty segment."""
        flat = entries.masked_fill(~self.enters, -torch.inf).flatten()
        return flat.new_full((self.size,), -torch.inf).scatter_reduce(0, self.index.flatten(), flat, "amax")

    def differs(self, entries: Tensor) -> Tensor:
        """Whether the entries of each segment differ, bool `(S,)`."""
        return self.largest(entries) + self.largest(-entries) > 0

    def leave_one_out(self, entries: Tensor) -> Tensor:
        """Mean of the other entries of the segment, in the shape of the entries; 0 if there are none."""
        others = torch.where(self.enters, self.broadcast(self.count) - 1.0, self.broadcast(self.count))
        own = entries.masked_fill(~self.enters, 0.0)
        rest = self.broadcast(self._exact_sum(entries)) - own
        return (rest / torch.where(others > 0.5, others, 1.0)).to(entries.dtype).masked_fill(others <= 0.5, 0.0)

    def median(self, entries: Tensor) -> Tensor:
        """Weighted median `(S,)`: the mean of the two middle entries if the weight splits evenly."""
        keep = self.enters.flatten()
        flat, weight, index = entries.flatten()[keep], self.weight.flatten()[keep], self.index.flatten()[keep]
        order = torch.argsort(flat)
        order = order[torch.argsort(index[order], stable=True)]  # by segment, then by value
        flat, weight, index = flat[order], weight[order], index[order]
        before = torch.cumsum(self.count, 0) - self.count
        position = torch.cumsum(weight, 0) - before[index]  # cumulative weight within the segment, inclusive
        half, slack = 0.5 * self.count[index], 1e-6 * self.count[index]
        reaches, passes = position >= half - slack, position > half + slack
        return 0.5 * (self._smallest(flat, index, reaches) + self._smallest(flat, index, passes))

    def _smallest(self, flat: Tensor, index: Tensor, chosen: Tensor) -> Tensor:
        least = flat.new_full((self.size,), torch.inf).scatter_reduce(0, index[chosen], flat[chosen], "amin")
        return least.masked_fill(torch.isinf(least), 0.0)

    def _exact_sum(self, entries: Tensor) -> Tensor:
        return self._add(entries.masked_fill(~self.enters, 0.0).double() * self.weight)

    def _add(self, entries: Tensor) -> Tensor:
        # In double precision, so that equal values give equal statistics.
        doubled = entries.double()
        return doubled.new_zeros(self.size).index_add(0, self.index.flatten(), doubled.flatten())
