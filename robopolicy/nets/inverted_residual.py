"""Inverted residual networks of FlashSAC (Kim et al. 2026): batch normalisation and weights of unit norm.

M networks run as one. A block widens its input four times, narrows it again and adds the input; each of its two linear
layers is followed by batch normalisation and ReLU. The blocks end in RMS normalisation. Every row of a weight matrix
has norm 1, and the scales (with the shifts) of a normalisation layer of width D have norm sqrt(D): `keep_unit_norm`
restores both after every optimiser step.

Batch normalisation uses running statistics, so rows do not affect each other, except within `batch_statistics`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.errors import UserError

EXPANSION = 4  # hidden width of a block over its width
MOMENTUM = 0.01  # weight of a batch in the running statistics


class ConstrainedNorm(nn.Module):
    """Layer whose parameters have rows of a fixed norm."""

    radius: Tensor  # (R, 1)

    @abstractmethod
    def constrained(self) -> list[nn.Parameter]:
        """Parameters `(..., n)`; their rows, joined along the last dimension, have norm `radius`."""

    @torch.no_grad()
    def unit(self) -> list[Tensor]:
        """Scaled copies of the constrained parameters."""
        parameters = self.constrained()
        rows = [parameter.flatten(0, -2) for parameter in parameters]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows, -1)
        scaled = torch._weight_norm(joined, self.radius, 0)  # one kernel
        parts = scaled.split([row.shape[1] for row in rows], -1)
        return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]

    def _set_radius(self, rows: int, value: float) -> None:
        self.register_buffer("radius", torch.full((rows, 1), value), persistent=False)


class UnitLinear(ConstrainedNorm):
    """M linear layers without bias: `(M, B, in)` -> `(M, B, out)`; every output has a weight vector of norm 1."""

    def __init__(self, members: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, out_dim, in_dim))
        for weight in self.weight.unbind():
            nn.init.orthogonal_(weight)
        self._set_radius(members * out_dim, 1.0)

    def constrained(self) -> list[nn.Parameter]:
        """Weights `(M, out, in)`."""
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        """Apply member m to `x[m]`."""
        return torch.bmm(x, self.weight.mT)


class BatchNorm(ConstrainedNorm):
    """Batch normalisation `(M, B, D)` with a scale, a shift and running statistics per member."""

    mean: Tensor
    var: Tensor

    def __init__(self, members: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, dim))
        self.shift = nn.Parameter(torch.zeros(members, dim))
        self.register_buffer("mean", torch.zeros(members, dim))
        self.register_buffer("var", torch.ones(members, dim))
        self._set_radius(members, math.sqrt(dim))
        self.uses_batch = False  # statistics of the batch, which update the running ones

    def constrained(self) -> list[nn.Parameter]:
        """Scales and shifts `(M, D)`."""
        return [self.scale, self.shift]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over B."""
        members, rows, dim = x.shape
        flat = x.transpose(0, 1).reshape(rows, members * dim)  # members as further columns, for one kernel
        state = (self.mean.flatten(), self.var.flatten(), self.scale.flatten(), self.shift.flatten())
        normalized = F.batch_norm(flat, *state, training=self.uses_batch, momentum=MOMENTUM, eps=1e-5)
        return normalized.view(rows, members, dim).transpose(0, 1)


class RMSNorm(ConstrainedNorm):
    """RMS normalisation `(M, B, D)` with a scale per member."""

    def __init__(self, members: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, dim))
        self._set_radius(members, math.sqrt(dim))

    def constrained(self) -> list[nn.Parameter]:
        """Scales `(M, 1, D)`."""
        return [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.scale


class InvertedResidual(nn.Module):
    """M networks of equal blocks on the same input: `(B, in)` -> `(M, B, out)`."""

    def __init__(self, members: int, in_dim: int, hidden: Sequence[int], out_dim: int) -> None:
        """Build a block of each width of `hidden`, which must be equal."""
        super().__init__()
        if not hidden or len(set(hidden)) != 1:
            raise UserError(f"An inverted residual network needs equal widths, e.g. [256] * 2; got {list(hidden)}.")
        width, wide = hidden[0], EXPANSION * hidden[0]
        self.members = members
        self.embedding = nn.Sequential(BatchNorm(members, in_dim), UnitLinear(members, in_dim, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                UnitLinear(members, width, wide),
                BatchNorm(members, wide),
                nn.ReLU(),
                UnitLinear(members, wide, width),
                BatchNorm(members, width),
                nn.ReLU(),
            )
            for _ in hidden
        )
        self.norm = RMSNorm(members, width)
        self.output = UnitLinear(members, width, out_dim)
        self.bias = nn.Parameter(torch.zeros(members, 1, out_dim))
        normalize_rows(constrained_layers(self))

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Outputs of all members, or of `members` `(m,)`, at `x` `(B, in)`."""
        x = self.norm(self._run_blocks(x, len(self.blocks)))
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 has 8 bits
            output = torch.baddbmm(self.bias, x.to(self.bias.dtype), self.output.weight.mT)
        return output if members is None else output[members]

    def representation(self, x: Tensor) -> Tensor:
        """Activations `(M, B, width)` after half of the blocks."""
        return self._run_blocks(x, (len(self.blocks) + 1) // 2)

    def _run_blocks(self, x: Tensor, blocks: int) -> Tensor:
        x = self.embedding(x.expand(self.members, *x.shape))
        for block in self.blocks[:blocks]:
            x = x + block(x)
        return x


def constrained_layers(network: nn.Module) -> list[ConstrainedNorm]:
    """Layers of `network` with a fixed norm."""
    return [layer for layer in network.modules() if isinstance(layer, ConstrainedNorm)]


@torch.no_grad()
def normalize_rows(layers: Sequence[ConstrainedNorm]) -> None:
    """Scale the parameters of `layers` to their norms."""
    parameters: list[Tensor] = [parameter for layer in layers for parameter in layer.constrained()]
    torch._foreach_copy_(parameters, [value for layer in layers for value in layer.unit()])


def keep_unit_norm(optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
    """Scale the parameters of `network` to their norms after every step of `optimizer`."""
    if layers := constrained_layers(network):
        optimizer.register_step_post_hook(lambda *_: normalize_rows(layers))


def batch_norms(*networks: nn.Module) -> list[BatchNorm]:
    """Batch normalisation layers of `networks`."""
    return [layer for network in networks for layer in network.modules() if isinstance(layer, BatchNorm)]


@contextmanager
def batch_statistics(layers: Sequence[BatchNorm]) -> Iterator[None]:
    """Normalise by the statistics of each batch, and update the running statistics by them."""
    for layer in layers:
        layer.uses_batch = True
    try:
        yield
    finally:
        for layer in layers:
            layer.uses_batch = False
