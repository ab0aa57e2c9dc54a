"""Decisions laid out in time: each trajectory in one line, whichever rows it stands in, and its units one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions, row_numbers, unit_numbers


class Timeline:
    """The decisions of each trajectory in one line: S lines of at most L entries."""

    def __init__(self, decisions: Decisions) -> None:
        rows, columns = decisions.shape
        device = decisions.logp_old.device
        number = row_numbers(decisions)
        if decisions.trajectory is None:
            line = torch.arange(rows, device=device)
        else:
            line = torch.searchsorted(torch.sort(decisions.trajectory[number == 0])[0], decisions.trajectory)
        longest = int(number.max()) + 1
        self.place = (line * longest + number).unsqueeze(1) * columns + torch.arange(columns, device=device)  # (N, T)
        self.shape = (int(line.max()) + 1, longest * columns)
        self.valid = self.lay(decisions.valid())  # (S, L)
        self.unit = self.lay(unit_numbers(decisions))  # (S, L)

    def lay(self, value: Tensor) -> Tensor:
        """Per decision `(N, T)` to lines `(S, L)`; 0 where a trajectory is shorter."""
        flat = value.new_zeros(self.shape[0] * self.shape[1])
        return flat.scatter(0, self.place.flatten(), value.flatten()).view(self.shape)

    def back(self, value: Tensor) -> Tensor:
        """Lines `(S, L)` to `(N, T)`."""
        return value.flatten()[self.place]


class Units:
    """The units (chunks, turns) of each trajectory in order: S lines of at most U units."""

    def __init__(self, decisions: Decisions) -> None:
        self.line = line = Timeline(decisions)
        starts = torch.zeros_like(line.valid)
        current = torch.full_like(line.unit[:, 0], -1)
        for t in range(line.shape[1]):
            now = line.valid[:, t]
            starts[:, t] = now & (line.unit[:, t] != current)
            current = torch.where(now, line.unit[:, t], current)
        number = torch.cumsum(starts.long(), 1)  # 1 for the first unit, 0 before it
        self.index = (number - 1).clamp(min=0)  # (S, L) unit of each entry
        self.count = max(1, int(number.max()))
        places = torch.arange(self.count, device=number.device)
        self.valid = places < number[:, -1:]  # (S, U)
        self.starts = torch.searchsorted(number, (places + 1).expand(len(number), -1).contiguous())  # (S, U)
        self.starts = self.starts.clamp(max=line.shape[1] - 1)

    def at(self, value: Tensor) -> Tensor:
        """What stands at the first decision of each unit, `(N, T)` to `(S, U)`; 0 where there is no unit."""
        return self.line.lay(value).gather(1, self.starts).masked_fill(~self.valid, 0)

    def sums(self, value: Tensor) -> Tensor:
        """Sum over the valid decisions of each unit, `(N, T)` to `(S, U)`."""
        laid = self.line.lay(value).masked_fill(~self.line.valid, 0)
        return laid.new_zeros(len(laid), self.count).scatter_add(1, self.index, laid)

    def beginnings(self) -> Tensor:
        """The first decision of each unit, bool `(N, T)`."""
        begins = torch.zeros_like(self.line.unit).scatter_add(1, self.starts, self.valid.to(self.line.unit.dtype))
        return self.line.back(begins > 0)

    def spread(self, value: Tensor) -> Tensor:
        """One number per unit `(S, U)` to its decisions `(N, T)`; 0 where the mask is off."""
        return self.line.back(value.gather(1, self.index).masked_fill(~self.line.valid, 0))


def following(value: Tensor) -> Tensor:
    """The entry after each `(S, U)`; 0 behind the last."""
    return torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
