"""Action-value ensembles over observations and action chunks, scalar or distributional (HL-Gauss).

All members run as one batched matrix product. Inputs are the policy's observations and the executed part of a chunk,
normalised by copies of the policy's normalisers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.constraints import Finite, FractionBelowOne, NonNegativeInt, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.mlp import EnsembleMLP
from robopolicy.nets.normalizer import Normalizer, make_normalizer
from robopolicy.nets.vision import VisionConfig
from robopolicy.spec import PolicySpec

SIGMA_PER_BIN = 0.75  # width of the smoothing Gaussian in bins, the paper's choice


class HLGauss(nn.Module):
    """Histogram encoding: maps scalars to bin probabilities, and logits to scalars."""

    edges: Tensor
    centers: Tensor

    def __init__(self, bins: int, low: float, high: float) -> None:
        super().__init__()
        if bins < 2 or not low < high:
            raise UserError(f"A value histogram needs at least 2 bins and low < high, got {bins}, {low}, {high}.")
        edges = torch.linspace(low, high, bins + 1)
        self.sigma = SIGMA_PER_BIN * (high - low) / bins
        self.register_buffer("edges", edges, persistent=False)  # (bins + 1,)
        self.register_buffer("centers", (edges[1:] + edges[:-1]) / 2, persistent=False)

    def probabilities(self, target: Tensor) -> Tensor:
        """Mass per bin `(..., bins)` of a Gaussian around `target` `(...)`, truncated to the support."""
        target = target.clamp(self.edges[0], self.edges[-1])
        cdf = torch.special.ndtr((self.edges - target.unsqueeze(-1)) / self.sigma)
        return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])

    def mean(self, logits: Tensor) -> Tensor:
        """Expected value `(...)` of logits `(..., bins)`."""
        # A sum, because autocast would compute a matrix product with 8 bits of precision.
        return (logits.float().softmax(-1) * self.centers).sum(-1)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy `(...)`."""
        return -(self.probabilities(target) * F.log_softmax(logits, -1)).sum(-1)


@dataclass(frozen=True)
class CriticConfig(Validated):
    """Architecture of a `QEnsemble`."""

    members: PositiveInt = 2  # M, independent networks
    hidden: tuple[PositiveInt, ...] = (256, 256, 256)
    activation: str = "silu"
    layer_norm: bool = True  # after every hidden layer; bounds values outside the data (RLPD)
    dropout: FractionBelowOne = 0.0  # of hidden units in training, never in the target
    bins: NonNegativeInt = 0  # HL-Gauss: bins of the value histogram; 0: scalar regression
    value_min: Finite | None = None  # HL-Gauss: support of the histogram; targets are clamped to it
    value_max: Finite | None = None
    vision: VisionConfig = field(default_factory=VisionConfig)


class CriticInput(Protocol):
    """Interface of a policy that its critic uses; a protocol, because policies may contain critics."""

    name: ClassVar[str]
    spec: PolicySpec

    def modules(self) -> Iterator[nn.Module]:
        """All modules, including the normalisers."""
        ...


class QEnsemble(nn.Module):
    """Q_m(s, chunk), m = 1..M: observations `{key: (B, To, ...)}` and chunks `(B, n, A)` in env units -> `(M, B)`."""

    def __init__(
        self, config: CriticConfig, policy: CriticInput, *, steps: int | None = None, outputs: int = 1, extra: int = 0
    ) -> None:
        """Build the critic of `policy` with copies of its normalisers.

        `steps` is n, the number of actions in the input (default: the executed ones), `outputs` the number of values
        of a member without histogram, and `extra` the number of further outputs.
        """
        super().__init__()
        self.config = config
        spec = policy.spec
        self.steps = spec.action_horizon if steps is None else steps
        self.encoder, self.action_normalizer = copy_normalizers(policy, config.vision)
        size = spec.obs_horizon * self.encoder.feature_dim + self.steps * spec.action_dim
        self.histogram = _histogram(config)
        self.body = EnsembleMLP(
            config.members,
            size,
            config.hidden,
            (config.bins or outputs) + extra,
            activation=config.activation,
            layer_norm=config.layer_norm,
            dropout=config.dropout,
        )

    def encode(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Flat features `(B, F)` of observations."""
        return self.encoder(obs).flatten(1)

    def output(self, features: Tensor, chunk: Tensor, members: Tensor | None = None) -> Tensor:
        """Raw outputs `(M, B, n)` or logits `(M, B, bins)` of features `(B, F)`, for all or some `members` `(m,)`."""
        return self.body(self._joined(features, chunk), members)

    def _joined(self, features: Tensor, chunk: Tensor) -> Tensor:
        action = self.action_normalizer.normalize(chunk[:, : self.steps]).flatten(1)
        return torch.cat([features, action], -1)

    def value(self, output: Tensor) -> Tensor:
        """Values `(M, ...)` from raw outputs."""
        return output.squeeze(-1) if self.histogram is None else self.histogram.mean(output)

    def forward(self, obs: Mapping[str, Tensor], chunk: Tensor, members: Tensor | None = None) -> Tensor:
        """Values `(M, B)`; with `members` `(m,)` values `(m, B)`."""
        return self.value(self.output(self.encode(obs), chunk, members))

    def min_q(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """Minimum value `(B,)` over all members, for actor losses: the critic's weights may receive no gradient."""
        if self.histogram is not None:
            return self(obs, chunk).min(0).values
        return self.body.min_output(self._joined(self.encode(obs), chunk))

    def candidate_values(self, obs: Mapping[str, Tensor], chunks: Tensor) -> Tensor:
        """Values `(M, B, C)` of candidate chunks `(B, C, n, A)`; observations are encoded once."""
        features = self.encode(obs).repeat_interleave(chunks.shape[1], 0)
        return self.value(self.output(features, chunks.flatten(0, 1))).unflatten(1, chunks.shape[:2])

    def regression(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss `(M, B)` of raw outputs to `target` `(B,)`: squared error, or cross-entropy of the histogram."""
        if self.histogram is None:
            return (output.squeeze(-1) - target).square()
        return self.histogram.loss(output, target.expand(output.shape[:-1]))


def random_members(count: int, size: int, generator: torch.Generator) -> Tensor | None:
    """Draw `size` of `count` members (REDQ); None stands for all members."""
    return None if size >= count else torch.randperm(count, generator=generator)[:size]


def random_subset_min(values: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Minimum `(...)` over `size` randomly chosen members of `values` `(M, ...)`."""
    members = random_members(len(values), size, generator)
    return (values if members is None else values[members.to(values.device)]).amin(0)


class TargetUpdate:
    """Polyak update of a target network."""

    def __init__(self, target: nn.Module, source: nn.Module) -> None:
        # Traversing the modules costs as much as the arithmetic, so it is done once.
        self._target: list[Tensor] = list(target.parameters())
        self._source: list[Tensor] = list(source.parameters())
        self._buffers: list[Tensor] = list(target.buffers())
        self._source_buffers: list[Tensor] = list(source.buffers())

    @torch.no_grad()
    def step(self, tau: float) -> None:
        """Move the parameters of the target by `tau` towards the source."""
        torch._foreach_lerp_(self._target, self._source, tau)

    @torch.no_grad()
    def copy_buffers(self) -> None:
        """Copy the buffers, without averaging."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._source_buffers)


def _histogram(config: CriticConfig) -> HLGauss | None:
    if not config.bins:
        return None
    if config.value_min is None or config.value_max is None:
        raise UserError(f"critic.bins={config.bins} needs critic.value_min and critic.value_max; set both.")
    return HLGauss(config.bins, config.value_min, config.value_max)


def copy_normalizers(policy: CriticInput, vision: VisionConfig) -> tuple[ObservationEncoder, Normalizer]:
    """Create an observation encoder and an action normaliser with the statistics of `policy`, or raise `UserError`."""
    encoders = [part for part in policy.modules() if isinstance(part, ObservationEncoder)]
    normalizer = next((p.action_normalizer for p in policy.modules() if hasattr(p, "action_normalizer")), None)
    if not encoders or not isinstance(normalizer, Normalizer):
        raise UserError(f"A critic needs the normalisers of its policy, and '{policy.name}' has none.")
    own = ObservationEncoder(policy.spec.observation, normalization=encoders[0].normalizer.mode, vision=vision)
    own.copy_stats(*encoders)
    action = make_normalizer(policy.spec.action_dim, normalizer.mode)
    action.load_state_dict(normalizer.state_dict())
    return own, action


def copy_statistics(encoder: ObservationEncoder, policy: CriticInput) -> None:
    """Copy the statistics of `policy` to a critic's encoder that needs dataset statistics.

    Raises `UserError` if the policy has another normalization or other observations.
    """
    mode = encoder.normalization
    if mode not in ("minmax", "meanstd"):
        return
    theirs = next((part for part in policy.modules() if isinstance(part, ObservationEncoder)), None)
    if theirs is None or (theirs.normalization, theirs.layout, theirs.sizes) != (mode, encoder.layout, encoder.sizes):
        raise UserError(
            f"A value network with normalization '{mode}' needs a policy with the same normalization and observations, "
            f"unlike '{policy.name}'; set it to running, e.g. algorithm.critic.normalization=running."
        )
    encoder.copy_stats(theirs)
