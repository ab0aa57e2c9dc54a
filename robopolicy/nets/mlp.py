"""Plain and residual multilayer perceptrons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name


class Tanh(nn.Module):
    """Hyperbolic tangent; on a CPU as `2 sigmoid(2 x) - 1`, forward and backward several times faster than torch's."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply tanh with an absolute error below 2e-7 in float32."""
        return torch.sigmoid(x + x).mul(2.0).sub(1.0) if x.device.type == "cpu" else x.tanh()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": Tanh,
}

IN_PLACE = {"elu": nn.ELU, "relu": nn.ReLU}  # gradient computable from the output


def make_activation(name: str, *, inplace: bool = False) -> nn.Module:
    """Build an activation by its lower-case name; with `inplace` it may overwrite its input."""
    if name not in ACTIVATIONS:
        raise unknown_name("activation", name, ACTIVATIONS)
    return IN_PLACE[name](inplace=True) if inplace and name in IN_PLACE else ACTIVATIONS[name]()


def orthogonal_init(network: nn.Module, output: nn.Linear, output_gain: float) -> None:
    """Initialise orthogonally as in PPO: gain sqrt(2) inside, `output_gain` at `output`, zero biases."""
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, output_gain if module is output else math.sqrt(2))
            nn.init.zeros_(module.bias)


INITS = ("torch", "xavier")


def check_init(init: str, backbone: str) -> None:
    """Raise a `UserError` for an unknown initialisation, or one that `backbone` does not have."""
    if init not in INITS:
        raise unknown_name("initialisation", init, INITS)
    if init != "torch" and backbone != "mlp":
        raise UserError(f"The backbone '{backbone}' has its own initialisation; set init=torch.")


def initialize(network: nn.Module, init: str) -> None:
    """Initialise all linear layers: `torch` keeps torch's values, `xavier` is uniform with zero biases.

    The variance of `xavier` is 2 / (inputs + outputs), per member of an ensemble (Glorot and Bengio 2010).
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | EnsembleLinear)]
    for layer in layers if init == "xavier" else ():
        bound = math.sqrt(6 / sum(layer.weight.shape[-2:]))
        nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.zeros_(layer.bias)


class MLP(nn.Sequential):
    """Linear layers with an activation between them: `(..., in_dim)` -> `(..., out_dim)`."""

    def __init__(
        self,
        in_dim: int,
        hidden: Sequence[int],
        out_dim: int,
        *,
        activation: str = "tanh",
        layer_norm: bool = False,
        dropout: float = 0.0,
        orthogonal_gain: float | None = None,
    ) -> None:
        """Build the layers, with LayerNorm after the activations if `layer_norm`.

        `orthogonal_gain` is the output gain of `orthogonal_init`, None for torch's default.
        """
        if any(width < 1 for width in hidden):
            raise UserError(f"Layer widths must be positive, got {list(hidden)}.")
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(in_dim, width), make_activation(activation, inplace=True)]
            if layer_norm:
                layers.append(nn.LayerNorm(width))
            if dropout:
                layers.append(nn.Dropout(dropout))
            in_dim = width
        output = nn.Linear(in_dim, out_dim)
        super().__init__(*layers, output)
        self._depth = len(hidden)
        if orthogonal_gain is not None:
            orthogonal_init(self, output, orthogonal_gain)

    def representation(self, x: Tensor) -> Tensor:
        """Activations `(..., width)` of the middle hidden layer."""
        layers = list(self.children())[:-1]
        for layer in layers[: len(layers) // self._depth * ((self._depth + 1) // 2)] if layers else ():
            x = layer(x)
        return x


class ResidualMLP(nn.Module):
    """Pre-activation residual blocks of two layers: `(..., in_dim)` -> `(..., out_dim)` (DPPO's backbone)."""

    def __init__(self, in_dim: int, hidden: Sequence[int], out_dim: int, *, activation: str = "relu") -> None:
        """Build an input layer of width `hidden[0]` and a block per further pair of (equal) widths."""
        super().__init__()
        if not hidden or len(hidden) % 2 == 0 or len(set(hidden)) != 1 or hidden[0] < 1:
            raise UserError(f"A residual MLP needs an odd number of equal widths, e.g. [512] * 3; got {list(hidden)}.")
        width = hidden[0]

        def layer() -> list[nn.Module]:
            return [make_activation(activation), nn.Linear(width, width)]

        self.input = nn.Linear(in_dim, width)
        self.blocks = nn.ModuleList(nn.Sequential(*layer(), *layer()) for _ in range(len(hidden) // 2))
        self.output = nn.Sequential(make_activation(activation), nn.Linear(width, out_dim))

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., in_dim)` to `(..., out_dim)`."""
        return self.output(self._run_blocks(x, len(self.blocks)))

    def representation(self, x: Tensor) -> Tensor:
        """Activations `(..., width)` after half of the blocks."""
        return self._run_blocks(x, (len(self.blocks) + 1) // 2)

    def _run_blocks(self, x: Tensor, blocks: int) -> Tensor:
        x = self.input(x)
        for block in self.blocks[:blocks]:
            x = x + block(x)
        return x


class EnsembleLinear(nn.Module):
    """M linear layers: `(M, B, in)` -> `(M, B, out)`, each initialised like torch's."""

    def __init__(self, members: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_dim)
        self.weight = nn.Parameter(torch.empty(members, in_dim, out_dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, out_dim).uniform_(-bound, bound))

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Apply member m, or `members[m]`, to `x[m]`."""
        weight, bias = select_members(self.weight, members), select_members(self.bias, members)
        if weight.shape[2] > 1 or x.device.type != "cpu":
            return torch.baddbmm(bias, x, weight)
        return vector_products(x, weight) + bias


class EnsembleLayerNorm(nn.Module):
    """LayerNorm with a scale and shift per member."""

    def __init__(self, members: int, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(members, 1, dim))
        self.shift = nn.Parameter(torch.zeros(members, 1, dim))

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Normalise the last dimension of `(M, B, dim)`."""
        scale, shift = select_members(self.scale, members), select_members(self.shift, members)
        if x.device.type != "cpu":
            return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:]), scale)
        each = zip(x.unbind(), scale.squeeze(1).unbind(), shift.squeeze(1).unbind(), strict=True)
        return torch.stack([F.layer_norm(rows, x.shape[-1:], weight, bias) for rows, weight, bias in each])


def vector_products(x: Tensor, weight: Tensor) -> Tensor:
    """`x[m] @ weight[m]` of matrices `(M, B, in)` and vectors `(M, in, 1)`: `(M, B, 1)`, in the precision of `weight`.

    On a CPU a batched product would be slow, and so would the gradient of a sum of elementwise products.
    """
    each = zip(x.to(weight.dtype).unbind(), weight.squeeze(2).unbind(), strict=True)
    return torch.stack([torch.mv(rows, vector) for rows, vector in each]).unsqueeze(-1)


def select_members(parameter: Tensor, members: Tensor | None) -> Tensor:
    """Rows of `members`, or all if None."""
    return parameter if members is None else parameter[members]


class EnsembleMLP(nn.Module):
    """M multilayer perceptrons on the same input: `(B, in)` -> `(M, B, out)`."""

    def __init__(
        self,
        members: int,
        in_dim: int,
        hidden: Sequence[int],
        out_dim: int,
        *,
        activation: str = "silu",
        layer_norm: bool = False,
        norm_after_activation: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.members = members
        self._rectified = activation == "relu" and not layer_norm and not dropout and out_dim == 1
        layers: list[nn.Module] = []
        for width in hidden:
            layers.append(EnsembleLinear(members, in_dim, width))
            norm = [EnsembleLayerNorm(members, width)] if layer_norm else []
            function = [make_activation(activation, inplace=True)]
            layers += function + norm if norm_after_activation else norm + function
            if dropout:
                layers.append(nn.Dropout(dropout))
            in_dim = width
        self.layers = nn.Sequential(*layers, EnsembleLinear(members, in_dim, out_dim))

    def forward(self, x: Tensor, members: Tensor | None = None) -> Tensor:
        """Apply all members, or only `members` `(m,)`, to `x` `(B, in)`."""
        x = x.expand(self.members if members is None else len(members), *x.shape)
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x, members) if isinstance(layer, EnsembleLinear | EnsembleLayerNorm) else layer(x)
        with torch.autocast(x.device.type, enabled=False):  # bfloat16 has 8 bits
            return last(x.float() if x.dtype == torch.bfloat16 else x, members)

    def min_output(self, x: Tensor) -> Tensor:
        """Minimum output `(B,)` over all members at `x` `(B, in)`, differentiable only in `x`."""
        # Matrix products of varying sizes are fast only in single precision on a CPU.
        if self._rectified and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
            linear = [layer for layer in self.layers if isinstance(layer, EnsembleLinear)]
            return _MemberMin.apply(x, [(layer.weight, layer.bias) for layer in linear])  # type: ignore[return-value]
        return self(x).squeeze(-1).min(0).values


class _MemberMin(torch.autograd.Function):
    """Minimum over members; only the minimal member of each row is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        weights, hidden = [weight for weight, _ in layers], []
        h = x.expand(len(weights[0]), *x.shape)
        for weight, bias in layers[:-1]:
            h = torch.baddbmm(bias, h, weight).relu_()
            hidden.append(h)
        values = vector_products(h, weights[-1]) + layers[-1][1]  # (M, B, 1)
        least, member = values.squeeze(-1).min(0)
        ctx.save_for_backward(member, *hidden)
        ctx.weights, ctx.columns = weights, x.shape[1]
        return least

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (member, *hidden) = gradients, ctx.saved_tensors
        result = gradient.new_empty(len(member), ctx.columns)
        for index in range(len(ctx.weights[0])):
            rows = (member == index).nonzero().squeeze(1)
            slope = gradient[rows, None] * ctx.weights[-1][index].t()  # (n, width)
            for weight, h in zip(ctx.weights[-2::-1], hidden[::-1], strict=True):
                active = h[index].index_select(0, rows)
                slope = torch.ops.aten.threshold_backward(slope.to(h.dtype), active, 0)
                slope = slope @ weight[index].to(h.dtype).t()
            result[rows] = slope.to(result.dtype)
        return result, None
