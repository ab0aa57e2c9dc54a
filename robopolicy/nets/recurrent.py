"""Recurrent cells with their state in one vector, which is 0 at the start of an episode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robopolicy.constraints import PositiveInt, Validated
from robopolicy.errors import unknown_name

KINDS = ("none", "gru", "lstm")


@dataclass(frozen=True)
class RecurrentConfig(Validated):
    """Recurrent cell of a policy, if any."""

    kind: str = "none"  # none | gru | lstm
    width: PositiveInt = 64  # units of the cell

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise unknown_name("recurrent cell", self.kind, KINDS)


class RecurrentCell(nn.Module):
    """One step of a GRU or an LSTM: features `(B, F)` and state `(B, M)` to the next state `(B, M)`.

    M is the width, or twice the width for an LSTM: its output, then its cell state.
    """

    def __init__(self, config: RecurrentConfig, in_dim: int) -> None:
        super().__init__()
        self.width = config.width
        self.hidden_dim = config.width * (2 if config.kind == "lstm" else 1)
        kind = nn.LSTMCell if config.kind == "lstm" else nn.GRUCell
        self.cell: nn.LSTMCell | nn.GRUCell = kind(in_dim, config.width)

    def forward(self, features: Tensor, memory: Tensor) -> Tensor:
        """State after `features`."""
        if isinstance(self.cell, nn.LSTMCell):
            output, state = memory.split(self.width, -1)
            return torch.cat(self.cell(features, (output, state)), -1)
        return self.cell(features, memory)

    def output(self, memory: Tensor) -> Tensor:
        """Output `(..., width)` of a state `(..., M)`."""
        return memory[..., : self.width]
