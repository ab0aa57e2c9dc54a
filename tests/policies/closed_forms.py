"""Scalar distributions with closed-form denoisers, and heads with a closed form in place of the network."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.edm import EDMConfig, EDMPolicy, preconditioning
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import PathEstimate, prediction_target

POINT = PolicySpec({"state": (1,)}, action_dim=1)
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity", "action_clip": 0.0}
BOUNDED: dict[str, Any] = {**RAW, "action_clip": 1.0}


def nothing(rows: int) -> dict[str, Tensor]:
    """Observations without information."""
    return {"state": torch.zeros(rows, 1, 1)}


@dataclass(frozen=True)
class Mixture:
    """A mixture of Gaussians with equal standard deviations."""

    means: tuple[float, ...]
    shares: tuple[float, ...]
    std: float

    def draw(self, rows: int) -> Tensor:
        chosen = torch.multinomial(torch.tensor(self.shares), rows, replacement=True)
        return (torch.tensor(self.means)[chosen] + self.std * torch.randn(rows)).view(-1, 1, 1)

    def estimate(self, x: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
        """Expected data and noise given `x = a * data + b * noise`."""
        x, a, b = x.double(), a.double(), b.double()
        means, shares = torch.tensor(self.means).double(), torch.tensor(self.shares).double()
        variance = (a * self.std) ** 2 + b**2
        gap = x - a * means  # one column per mode
        responsibility = (shares.log() - gap**2 / (2 * variance)).softmax(-1)
        data = (responsibility * (means + a * self.std**2 * gap / variance)).sum(-1, keepdim=True)
        noise = (responsibility * b * gap / variance).sum(-1, keepdim=True)
        return PathEstimate(data, noise)

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        """Velocity of the linear path."""
        return self.estimate(x, t, 1 - t).velocity.float()


GAUSSIAN = Mixture((0.4,), (1.0,), 0.3)
TWO_MODES = Mixture((-0.6, 0.6), (0.7, 0.3), 0.1)


class ExactFlow(nn.Module):
    """Exact output of the network of a flow head."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        return self.mixture.velocity(x, t.view(-1, 1, 1))


class ExactDiffusion(nn.Module):
    """Exact output of the network of a diffusion head, also between the noise levels."""

    def __init__(self, mixture: Mixture, config: DiffusionConfig) -> None:
        super().__init__()
        self.mixture, self.config = mixture, config
        self.log_snr = torch.logit(config.alpha_bars())

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        level = (1 - t.double()) * self.config.train_steps - 1
        low = level.floor().clamp(0, self.config.train_steps - 2).long()
        log_snr = self.log_snr[low] + (level - low) * (self.log_snr[low + 1] - self.log_snr[low])
        a, b = log_snr.sigmoid().sqrt().view(-1, 1, 1), (-log_snr).sigmoid().sqrt().view(-1, 1, 1)
        found = self.mixture.estimate(x, a, b)
        return prediction_target(self.config.prediction, found.data, found.noise, a, b).float()


class ExactEDM(nn.Module):
    """Exact output of the network of an EDM head."""

    def __init__(self, mixture: Mixture, config: EDMConfig) -> None:
        super().__init__()
        self.mixture, self.config = mixture, config

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        sigma = (4 * t.double()).exp().view(-1, 1, 1)
        c_skip, c_out, c_in = preconditioning(sigma, self.config.sigma_data)
        x = x / c_in
        return ((self.mixture.estimate(x, torch.ones_like(sigma), sigma).data - c_skip * x) / c_out).float()


def exact_flow(mixture: Mixture, **settings: Any) -> FlowPolicy:
    policy = FlowPolicy(FlowConfig(**(RAW | settings)), POINT)
    policy.backbone = ExactFlow(mixture)
    return policy


def exact_diffusion(mixture: Mixture, **settings: Any) -> DiffusionPolicy:
    policy = DiffusionPolicy(DiffusionConfig(**(RAW | settings)), POINT)
    policy.backbone = ExactDiffusion(mixture, policy.config)
    return policy


def exact_edm(mixture: Mixture, **settings: Any) -> EDMPolicy:
    policy = EDMPolicy(EDMConfig(**(RAW | settings)), POINT)
    policy.backbone = ExactEDM(mixture, policy.config)
    return policy


def learn(policy: GenerativePolicy, mixture: Mixture, updates: int = 600, lr: float = 1e-2) -> None:
    """Imitate samples of `mixture`."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    for i in range(updates):
        optimizer.param_groups[0]["lr"] = lr * (1 - i / updates)
        loss, _ = policy.imitation_loss(nothing(512), mixture.draw(512))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()


def check_two_modes(drawn: Tensor) -> None:
    """Samples `(B, 1, 1)` are at both modes of `TWO_MODES` in the right proportion, with few between the modes."""
    drawn = drawn.flatten()
    low, high = drawn[drawn < 0], drawn[drawn > 0]
    assert abs(len(low) / len(drawn) - 0.7) < 0.06
    assert abs(float(low.median()) + 0.6) < 0.08 and abs(float(high.median()) - 0.6) < 0.12
    assert float((drawn.abs() < 0.3).float().mean()) < 0.17
