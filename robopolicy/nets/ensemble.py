"""M independent multilayer perceptrons as one batched matrix product per layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robopolicy.nets.mlp import make_activation


class EnsembleLinear(nn.Module):
    """M linear layers: `(M, B, in)` -> `(M, B, out)`; initialised member by member as torch's."""

    def __init__(self, members: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_dim)
        self.weight = nn.Parameter(torch.empty(members, in_dim, out_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_dim).uniform_(-bound, bound))

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Apply member m to `x[m]`, or `members[m]` where given."""
        weight, bias = of(self.weight, members), of(self.bias, members)
        if weight.shape[2] == 1:  # batched products of matrix and vector are slow on a CPU
            return (x * weight.transpose(1, 2)).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class EnsembleLayerNorm(nn.Module):
    """LayerNorm with an own scale and shift per member."""

    def __init__(self, members: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, dim))
        self.shift = nn.Parameter(torch.zeros(members, 1, dim))

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Normalise the last dimension of `(M, B, dim)`."""
        return torch.addcmul(
            of(self.shift, members), nn.functional.layer_norm(x, x.shape[-1:]), of(self.scale, members)
        )


def of(parameter: Tensor, members: Tensor | None) -> Tensor:
    """The rows of some members, or all of them."""
    return parameter if members is None else parameter[members]


class EnsembleMLP(nn.Module):
    """Every member sees the same input: `(B, in)` -> `(M, B, out)`, or only some members do."""

    def __init__(
        self,
        members: int,
        in_dim: int,
        hidden: Sequence[int],
        out_dim: int,
        *,
        activation: str = "silu",
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.members = members
        layers: list[nn.Module] = []
        for width in hidden:
            layers.append(EnsembleLinear(members, in_dim, width))
            if layer_norm:
                layers.append(EnsembleLayerNorm(members, width))
            layers.append(make_activation(activation, inplace=True))
            in_dim = width
        self.layers = nn.Sequential(*layers, EnsembleLinear(members, in_dim, out_dim))

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Apply all members, or those at `members` `(m,)`, to `x` `(B, in)`."""
        x = x.expand(self.members if members is None else len(members), *x.shape)
        for layer in self.layers:
            x = layer(x, members) if isinstance(layer, EnsembleLinear | EnsembleLayerNorm) else layer(x)
        return x
