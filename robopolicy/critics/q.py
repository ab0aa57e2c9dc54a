"""Action-value ensembles over observations and action chunks, scalar or distributional (HL-Gauss, C51).

All members run as one batched matrix product. Inputs are the policy's observations and the executed part of a chunk,
normalised by copies of the policy's normalisers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robopolicy.constraints import Finite, FractionBelowOne, NonNegativeInt, PositiveInt, Validated
from robopolicy.device import random_order
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.inverted_residual import InvertedResidual
from robopolicy.nets.mlp import EnsembleMLP, check_init, initialize
from robopolicy.nets.normalizer import Normalizer, make_normalizer
from robopolicy.nets.vision import VisionConfig
from robopolicy.spec import PolicySpec

SIGMA_PER_BIN = 0.75  # width of the smoothing Gaussian in bins, the paper's choice


class Histogram(nn.Module):
    """Distribution of values over bins: maps scalars to bin probabilities, and logits to scalars."""

    centers: Tensor

    def __init__(self, bins: int, low: float, high: float) -> None:
        super().__init__()
        if bins < 2 or not low < high:
            raise UserError(f"A value histogram needs at least 2 bins and low < high, got {bins}, {low}, {high}.")

    @abstractmethod
    def probabilities(self, target: Tensor) -> Tensor:
        """Mass per bin `(..., bins)` of the scalars `target` `(...)`."""

    def mean(self, logits: Tensor) -> Tensor:
        """Expected value `(...)` of logits `(..., bins)`."""
        return self.expected(logits.float().softmax(-1))

    def expected(self, probabilities: Tensor) -> Tensor:
        """Expected value `(...)` of `probabilities` `(..., bins)`."""
        # A sum, because autocast would compute a matrix product with 8 bits of precision.
        return (probabilities * self.centers).sum(-1)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy `(...)` to scalars `target` `(...)`."""
        return cross_entropy(logits, self.probabilities(target))


def cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Cross-entropy `(...)` of logits and probabilities `(..., bins)`."""
    return -(probabilities * F.log_softmax(logits, -1)).sum(-1)


class HLGauss(Histogram):
    """Histogram of a scalar smoothed by a Gaussian (HL-Gauss, Farebrother et al. 2024)."""

    edges: Tensor

    def __init__(self, bins: int, low: float, high: float) -> None:
        super().__init__(bins, low, high)
        edges = torch.linspace(low, high, bins + 1)
        self.sigma = SIGMA_PER_BIN * (high - low) / bins
        self.register_buffer("edges", edges, persistent=False)  # (bins + 1,)
        self.register_buffer("centers", (edges[1:] + edges[:-1]) / 2, persistent=False)

    def probabilities(self, target: Tensor) -> Tensor:
        """Mass per bin `(..., bins)` of a Gaussian around `target` `(...)`, truncated to the support."""
        target = target.clamp(self.edges[0], self.edges[-1])
        cdf = torch.special.ndtr((self.edges - target.unsqueeze(-1)) / self.sigma)
        return (cdf[..., 1:] - cdf[..., :-1]) / (cdf[..., -1:] - cdf[..., :1])


class C51(Histogram):
    """Categorical distribution of returns over equidistant atoms `centers` (Bellemare et al. 2017)."""

    def __init__(self, bins: int, low: float, high: float) -> None:
        super().__init__(bins, low, high)
        self.low, self.high, self.distance = low, high, (high - low) / (bins - 1)
        self.register_buffer("centers", torch.linspace(low, high, bins), persistent=False)

    def probabilities(self, target: Tensor) -> Tensor:
        """Mass per atom `(..., bins)` of `target` `(...)`, shared by its two neighbours."""
        offset = target.clamp(self.low, self.high).unsqueeze(-1) - self.centers
        return (1 - offset.abs() / self.distance).clamp_min(0)

    def project(self, probabilities: Tensor, atoms: Tensor) -> Tensor:
        """Distribute `probabilities` `(m, B, bins)` at `atoms` `(B, bins)` over the nearest atoms of the support."""
        bins = atoms.shape[-1]
        position = ((atoms - self.low) / self.distance).clamp(0, bins - 1)
        above = probabilities * position.frac()
        index = position.long().expand_as(probabilities)
        result = probabilities.new_zeros(*probabilities.shape[:-1], bins + 1)  # the last one stays 0
        result.scatter_add_(-1, index, probabilities - above).scatter_add_(-1, index + 1, above)
        return result[..., :bins]


HISTOGRAMS = {"hl_gauss": HLGauss, "c51": C51}
CRITIC_BACKBONES = ("mlp", "inverted_residual")


@dataclass(frozen=True)
class CriticConfig(Validated):
    """Architecture of a `QEnsemble`."""

    members: PositiveInt = 2  # M, independent networks
    backbone: str = "mlp"  # mlp | inverted_residual (FlashSAC; only with algorithm sac)
    hidden: tuple[PositiveInt, ...] = (256, 256, 256)  # inverted_residual: equal widths, one per block
    activation: str = "silu"  # mlp
    layer_norm: bool = True  # mlp: after every hidden layer; bounds values outside the data (RLPD)
    norm_after_activation: bool = False  # mlp: LayerNorm after the activations, as in FQL and QC, instead of before
    init: str = "torch"  # mlp: torch | xavier (uniform, with zero biases), as in FQL and QC
    dropout: FractionBelowOne = 0.0  # mlp: of hidden units in training, never in the target
    bins: NonNegativeInt = 0  # bins of the value histogram; 0: scalar regression
    histogram: str = "hl_gauss"  # hl_gauss: smoothed scalar targets | c51: in sac and td3 distributions of returns
    value_min: Finite | None = None  # support of the histogram; targets are clamped to it
    value_max: Finite | None = None
    privileged_obs: dict[str, PositiveInt] = field(default_factory=dict)  # replace the policy's observations
    vision: VisionConfig = field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.histogram not in HISTOGRAMS:
            raise unknown_name("histogram", self.histogram, HISTOGRAMS)
        check_init(self.init, self.backbone)
        if self.backbone not in CRITIC_BACKBONES:
            raise unknown_name("critic backbone", self.backbone, CRITIC_BACKBONES)


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
        if config.privileged_obs:
            self.encoder = _privileged_encoder(config, self.encoder.normalization)
        size = spec.obs_horizon * self.encoder.feature_dim + self.steps * spec.action_dim
        self.histogram = _histogram(config)
        width = (config.bins or outputs) + extra
        self.body: EnsembleMLP | InvertedResidual
        if config.backbone == "inverted_residual":
            self.body = InvertedResidual(config.members, size, config.hidden, width)
        else:
            self.body = EnsembleMLP(
                config.members,
                size,
                config.hidden,
                width,
                activation=config.activation,
                layer_norm=config.layer_norm,
                norm_after_activation=config.norm_after_activation,
                dropout=config.dropout,
            )
            initialize(self.body, config.init)

    def require_policy_obs(self) -> None:
        """Raise `UserError` if the critic has privileged observations, which are missing outside of training."""
        if self.config.privileged_obs:
            raise UserError("A policy that acts by a critic lacks privileged observations; drop critic.privileged_obs.")

    def encode(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Flat features `(B, F)` of observations."""
        return self.encoder(obs).flatten(1)

    def output(self, features: Tensor, chunk: Tensor, members: Tensor | None = None) -> Tensor:
        """Raw outputs `(M, B, n)` or logits `(M, B, bins)` of features `(B, F)`, for all or some `members` `(m,)`."""
        return self.body(self._joined(features, chunk), members)

    def _joined(self, features: Tensor, chunk: Tensor) -> Tensor:
        executed = chunk if chunk.shape[1] == self.steps else chunk[:, : self.steps]
        action = self.action_normalizer.normalize(executed).flatten(1)
        return torch.cat([features, action], -1)

    def value(self, output: Tensor) -> Tensor:
        """Values `(M, ...)` from raw outputs."""
        return output.squeeze(-1) if self.histogram is None else self.histogram.mean(output)

    def forward(self, obs: Mapping[str, Tensor], chunk: Tensor, members: Tensor | None = None) -> Tensor:
        """Values `(M, B)`; with `members` `(m,)` values `(m, B)`."""
        return self.value(self.output(self.encode(obs), chunk, members))

    def min_q(self, obs: Mapping[str, Tensor], chunk: Tensor) -> Tensor:
        """Minimum value `(B,)` over all members, for actor losses: the critic's weights may receive no gradient."""
        if self.histogram is not None or isinstance(self.body, InvertedResidual):
            return self(obs, chunk).min(0).values
        return self.body.min_output(self._joined(self.encode(obs), chunk))

    def candidate_values(self, obs: Mapping[str, Tensor], chunks: Tensor) -> Tensor:
        """Values `(M, B, C)` of candidate chunks `(B, C, n, A)`; observations are encoded once."""
        features = self.encode(obs).repeat_interleave(chunks.shape[1], 0)
        return self.value(self.output(features, chunks.flatten(0, 1))).unflatten(1, chunks.shape[:2])

    def regression(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss `(M, B)` of raw outputs to `target`: squared error, or cross-entropy of the histogram.

        `target` is `(B,)`, `(M, B)`, or probabilities `(1 or M, B, bins)`.
        """
        if self.histogram is None:
            value = output.squeeze(-1)
            return F.mse_loss(value, target.expand(value.shape), reduction="none")
        if target.dim() == 3:
            return cross_entropy(output, target)
        return self.histogram.loss(output, target.expand(output.shape[:-1]))


def random_members(count: int, size: int, generator: torch.Generator) -> Tensor | None:
    """Draw `size` of `count` members (REDQ); None stands for all members."""
    return None if size >= count else random_order(count, generator)[:size]


def random_subset_min(values: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Minimum `(...)` over `size` randomly chosen members of `values` `(M, ...)`."""
    members = random_members(len(values), size, generator)
    return (values if members is None else values[members]).amin(0)


def pessimistic_mean(values: Tensor, rho: float) -> Tensor:
    """Mean of `values` `(M, ...)` over members minus `rho` standard deviations, which are over M, not M - 1."""
    return values.mean(0) if rho == 0 else values.mean(0) - rho * values.std(0, correction=0)


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


def _histogram(config: CriticConfig) -> Histogram | None:
    if not config.bins:
        return None
    if config.value_min is None or config.value_max is None:
        raise UserError(f"critic.bins={config.bins} needs critic.value_min and critic.value_max; set both.")
    return HISTOGRAMS[config.histogram](config.bins, config.value_min, config.value_max)


def _privileged_encoder(config: CriticConfig, normalization: str) -> ObservationEncoder:
    if normalization not in ("running", "identity"):
        raise UserError(
            f"critic.privileged_obs has no statistics for policy.normalization={normalization}; set it to running."
        )
    observation = {key: (size,) for key, size in config.privileged_obs.items()}
    return ObservationEncoder(observation, normalization=normalization, vision=config.vision)


def copy_normalizers(policy: CriticInput, vision: VisionConfig) -> tuple[ObservationEncoder, Normalizer]:
    """Create an observation encoder and an action normaliser with the statistics of `policy`, or raise `UserError`."""
    encoders = [part for part in policy.modules() if isinstance(part, ObservationEncoder)]
    normalizer = next((p.action_normalizer for p in policy.modules() if hasattr(p, "action_normalizer")), None)
    if not encoders or not isinstance(normalizer, Normalizer):
        raise UserError(f"A critic needs the normalisers of its policy, and '{policy.name}' has none.")
    own = ObservationEncoder(policy.spec.observation, normalization=encoders[0].normalization, vision=vision)
    own.copy_stats(*encoders)
    action = make_normalizer(policy.spec.action_dim, normalizer.mode)
    action.load_state_dict(normalizer.state_dict())
    return own, action


def copy_statistics(encoder: ObservationEncoder, policy: CriticInput) -> None:
    """Copy the statistics of `policy` to a critic's encoder that has the same normalization and observations.

    Raises `UserError` if the encoder needs dataset statistics and the policy has other ones.
    """
    mode = encoder.normalization
    theirs = next((part for part in policy.modules() if isinstance(part, ObservationEncoder)), None)
    same = (mode, encoder.layout, encoder.sizes)
    if theirs is not None and (theirs.normalization, theirs.layout, theirs.sizes) == same:
        encoder.copy_stats(theirs)
    elif mode in ("minmax", "meanstd"):
        raise UserError(
            f"A value network with normalization '{mode}' needs a policy with the same normalization and observations, "
            f"unlike '{policy.name}'; set it to running, e.g. algorithm.critic.normalization=running."
        )
