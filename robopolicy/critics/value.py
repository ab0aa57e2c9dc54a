"""State value network on observations (not on denoising states), and losses of values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.constraints import Finite, PositiveInt, Validated
from robopolicy.critics.q import CriticInput, copy_normalizers, copy_statistics
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.mlp import MLP, ResidualMLP
from robopolicy.nets.normalizer import Statistics
from robopolicy.nets.vision import VisionConfig
from robopolicy.spec import PolicySpec


@dataclass(frozen=True)
class ValueConfig(Validated):
    """Architecture of a `ValueNet`."""

    hidden: tuple[PositiveInt, ...] = (64, 64)
    activation: str = "tanh"
    layer_norm: bool = False  # plain layers only: LayerNorm after the activations
    orthogonal_init: bool = True  # plain layers only: gain sqrt(2) inside and 1 at the output, zero biases
    residual: bool = False  # residual blocks (an odd number of equal widths), e.g. DPPO's [256, 256, 256] mish
    normalization: str = "running"  # minmax | meanstd | running | identity
    privileged_obs: dict[str, PositiveInt] = field(default_factory=dict)  # replace the policy's observations
    bias: Finite = 0.0  # initial bias of the output; a value above the returns is optimistic in new states
    vision: VisionConfig = field(default_factory=VisionConfig)


class ValueNet(nn.Module):
    """V(s): observations `{key: (B, To, ...)}` -> `(B,)`.

    Its input is the policy's observations, or `config.privileged_obs`, names and sizes of observations, e.g.
    `{state: 39}`: in training the state may be available where the policy has only cameras (asymmetric actor-critic,
    Pinto et al. 2017).
    """

    def __init__(self, config: ValueConfig, spec: PolicySpec) -> None:
        super().__init__()
        self.config = config
        self.observation = {key: (size,) for key, size in config.privileged_obs.items()} or dict(spec.observation)
        self.encoder = ObservationEncoder(self.observation, normalization=config.normalization, vision=config.vision)
        in_dim = spec.obs_horizon * self.encoder.feature_dim
        if config.residual:
            self.head: nn.Module = ResidualMLP(in_dim, config.hidden, 1, activation=config.activation)
        else:
            gain = 1.0 if config.orthogonal_init else None
            sizes = (in_dim, config.hidden, 1)
            self.head = MLP(*sizes, activation=config.activation, layer_norm=config.layer_norm, orthogonal_gain=gain)
        if config.bias:
            output = [layer for layer in self.head.modules() if isinstance(layer, nn.Linear)][-1]
            nn.init.constant_(output.bias, config.bias)

    @classmethod
    def for_policy(cls, config: ValueConfig, policy: CriticInput) -> ValueNet:
        """Build a value network with the normalisers of `policy`, unless its observations are privileged.

        Raises `UserError` if the policy lacks required dataset statistics.
        """
        value = cls(config, policy.spec)
        copy_statistics(value.encoder, policy)
        if config.normalization == "running" and not config.privileged_obs:
            value.encoder = copy_normalizers(policy, config.vision)[0]
        return value

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Estimate the return from `obs`."""
        features = self.encoder(obs).flatten(1)
        with torch.autocast(features.device.type, enabled=False):  # bfloat16 has 8 bits
            return self.head(features.float()).squeeze(-1)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the observation normaliser from dataset statistics."""
        self.encoder.fit_normalizer(statistics)

    def update_stats(self, obs: Mapping[str, Tensor]) -> None:
        """Update a running normaliser with `obs`; does nothing in other modes."""
        self.encoder.update_stats(obs)


def expectile_loss(difference: Tensor, expectile: float) -> Tensor:
    """Squared error `(...)` of `difference` = target - prediction, weighted `expectile` where positive, else 1 - it.

    0.5 is half the squared error; towards 1 the minimiser tends to the largest target (Kostrikov et al. 2021).
    """
    weight = torch.where(difference > 0, expectile, 1 - expectile)
    return weight * difference.square()


def advantage_weight(advantage: Tensor, beta: float, largest: float) -> Tensor:
    """Imitation weight `(...)` exp(beta * advantage), at most `largest`."""
    return (beta * advantage).clamp(max=math.log(largest)).exp()


def calibrated(values: Tensor, returns: Tensor) -> Tensor:
    """Values `(M, B, C)`, at least the return-to-go `(B,)` of the data; NaN returns are unknown and have no effect.

    A value below the return has no gradient, so it is not lowered further (Nakamoto et al. 2023).
    """
    bound = torch.where(returns.isnan(), -torch.inf, returns)
    return torch.maximum(values, bound[:, None])


def conservative_penalty(data: Tensor, policy: Tensor, uniform: Tensor, returns: Tensor) -> Tensor:
    """Soft maximum over sampled chunks minus the value of the data's chunk, `(M, B)` (CQL with Cal-QL).

    The soft maximum is the log of the mean exponential of the values of the data's chunk `(M, B)`, of chunks of the
    policy `(M, B, C)`, calibrated by the returns-to-go `(B,)` (NaN: unknown), and of uniform chunks `(M, B, U)`. The
    penalty is 0 if all values are equal. Without importance weights the policy needs no density.
    """
    values = torch.cat([calibrated(policy, returns), uniform, data.unsqueeze(-1)], -1)
    return values.logsumexp(-1) - math.log(values.shape[-1]) - data


def softmax_weights(values: Tensor, temperature: float) -> Tensor:
    """Probabilities `(..., C)` proportional to exp(value / temperature)."""
    return (values / temperature).softmax(-1)
