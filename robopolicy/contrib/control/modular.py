"""Gated modular perceptron: a network per context, mixed from shared weight modules.

Source: Cho et al. 2025, HAMNet. Every layer holds M modules of weights. A context network maps the context to mixing
coefficients `p` of the modules and gates `g` of the outputs, separately for weights and biases. The layer is

    y = tanh(norm(g * sum_m p_m W_m x + g' * sum_m p'_m b_m)),

the last one without norm and tanh. Tasks or scenes share the modules and differ in their mixtures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robopolicy.constraints import PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.backbone import BackboneBuilder, BackboneConfig, NetworkSizes
from robopolicy.nets.mlp import MLP
from robopolicy.nets.time import TimeEmbedding, network_rows


def modular_layer(x: Tensor, weight: Tensor, bias: Tensor, shares: Tensor, gates: Tensor) -> Tensor:
    """`g * sum_m p_m W_m x + g' * sum_m p'_m b_m` `(B, out)`.

    Args:
        x: (B, in).
        weight: (M, out, in) modules.
        bias: (M, out) modules.
        shares: (B, 2, M) p of weights and biases.
        gates: (B, 2, out) g of weights and biases.
    """
    each = weight @ x.mT  # mixing the weights first would create a matrix per row
    mixed = (shares[:, 0].mT.unsqueeze(1) * each).sum(0).mT
    return gates[:, 0] * mixed + gates[:, 1] * (shares[:, 1] @ bias)


class ModularMLP(nn.Module):
    """Modular layers: `(B, in_dim)` in a context `(B, C)` -> `(B, out_dim)`.

    Coefficients are a softmax over the modules. Gates lie in (0, 2) and start near 1, so that the initial network
    nearly ignores its context.
    """

    def __init__(
        self,
        in_dim: int,
        hidden: Sequence[int],
        out_dim: int,
        *,
        context_dim: int,
        modules: int = 8,
        context_width: int = 64,
        orthogonal_gain: float | None = None,
    ) -> None:
        """Build the modules.

        Args:
            in_dim: Input width.
            hidden: Width of each hidden layer; may be empty.
            out_dim: Output width.
            context_dim: C.
            modules: M.
            context_width: Hidden units of the context network.
            orthogonal_gain: Gain of the orthogonal initialisation of the output modules. None uses torch's default for
                linear layers, as the hidden modules do.
        """
        super().__init__()
        if modules < 1 or context_width < 1 or any(width < 1 for width in hidden):
            raise UserError(
                f"A modular network needs positive sizes, got {modules} modules, {context_width} context units and "
                f"layers {list(hidden)}."
            )
        self.count = modules
        self.widths = (*hidden, out_dim)
        sizes = list(zip((in_dim, *hidden), self.widths, strict=True))
        self.weights = nn.ParameterList([_uniform((modules, out, size), size) for size, out in sizes])
        self.biases = nn.ParameterList([_uniform((modules, out), size) for size, out in sizes])
        if orthogonal_gain is not None:
            for module in self.weights[-1]:
                nn.init.orthogonal_(module, orthogonal_gain)
            nn.init.zeros_(self.biases[-1])
        self.context = MLP(
            context_dim, (context_width,), sum(2 * (modules + out) for out in self.widths), orthogonal_gain=0.01
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Apply all layers."""
        return self._through(x, context, len(self.widths))

    def representation(self, x: Tensor, context: Tensor) -> Tensor:
        """Activations `(B, width)` of the middle hidden layer."""
        return self._through(x, context, len(self.widths) // 2)

    def modulation(self, context: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Coefficients `(B, 2, M)` and gates `(B, 2, out)` of every layer."""
        parts = self.context(context).split([2 * (self.count + out) for out in self.widths], -1)
        return [
            (
                part[:, : 2 * self.count].unflatten(1, (2, -1)).softmax(-1),
                2 * part[:, 2 * self.count :].unflatten(1, (2, -1)).sigmoid(),
            )
            for part in parts
        ]

    def _through(self, x: Tensor, context: Tensor, layers: int) -> Tensor:
        steps = zip(self.weights, self.biases, self.modulation(context), strict=True)
        for index, (weight, bias, (shares, gates)) in enumerate(list(steps)[:layers]):
            x = modular_layer(x, weight, bias, shares, gates)
            if index < len(self.widths) - 1:
                x = nn.functional.layer_norm(x, x.shape[1:]).tanh()
        return x


@dataclass(frozen=True)
class ModularConfig(Validated):
    """Settings of the backbone `modular`, in addition to `hidden` and `time_dim` of `BackboneConfig`."""

    modules: PositiveInt = 8  # weight modules of every layer, mixed by the features of the observation
    context_width: PositiveInt = 64  # hidden units of the network that computes the mixture


class ModularBackbone(nn.Module):
    """Counterpart of `MLPBackbone` with layers that the features mix from shared modules."""

    def __init__(self, config: BackboneConfig, *, size: int, feature_dim: int, times: int) -> None:
        super().__init__()
        self.time = TimeEmbedding(config.time_dim, times)
        in_dim = size + config.time_dim + feature_dim
        self.body = _layers(config, in_dim, size, feature_dim)

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Map `x` `(B, ..., H, A)`, `t` and `features` `(B, To, F)` to the shape of `x`; see `network_rows`."""
        return self.body(*self._joined(x, t, features)).view_as(x)

    def representation(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        """Activations `(B, D)` of the middle layer."""
        return self.body.representation(*self._joined(x, t, features))

    def _joined(self, x: Tensor, t: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x, time, features = network_rows(x, self.time(t), features)
        context = features.flatten(1)
        return torch.cat([x.flatten(1), time, context], -1), context


class DirectModular(nn.Module):
    """Map features `(B, To, F)` to `(B, H, channels)` by layers that the same features mix from shared modules."""

    def __init__(self, config: BackboneConfig, *, channels: int, horizon: int, in_dim: int, gain: float | None) -> None:
        super().__init__()
        self.shape = (horizon, channels)
        self.body = _layers(config, in_dim, horizon * channels, in_dim, gain)

    def forward(self, features: Tensor) -> Tensor:
        """Compute all steps of the chunk."""
        flat = features.flatten(1)
        return self.body(flat, flat).unflatten(1, self.shape)


class ModularBuilder(BackboneBuilder):
    """Layers that the features of the observation mix from shared modules (HAMNet)."""

    config_class = ModularConfig

    @classmethod
    def denoiser(cls, config: BackboneConfig, sizes: NetworkSizes, times: int) -> nn.Module:
        """Build layers over chunk, times and features."""
        return ModularBackbone(config, size=sizes.chunk, feature_dim=sizes.features, times=times)

    @classmethod
    def direct(cls, config: BackboneConfig, sizes: NetworkSizes, orthogonal_gain: float | None) -> nn.Module:
        """Build layers over the features."""
        return DirectModular(
            config, channels=sizes.action_dim, horizon=sizes.horizon, in_dim=sizes.features, gain=orthogonal_gain
        )


def _layers(
    config: BackboneConfig, in_dim: int, out_dim: int, context_dim: int, gain: float | None = None
) -> ModularMLP:
    options: ModularConfig = config.options()
    return ModularMLP(
        in_dim,
        config.hidden,
        out_dim,
        context_dim=context_dim,
        modules=options.modules,
        context_width=options.context_width,
        orthogonal_gain=gain,
    )


def _uniform(shape: tuple[int, ...], fan_in: int) -> nn.Parameter:
    """Initialise like torch's linear layers."""
    bound = 1 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
