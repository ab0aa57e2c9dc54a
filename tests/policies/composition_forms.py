"""Multivariate Gaussians with closed-form denoisers as policies of every family, and small networks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from closed_forms import RAW
from torch import Tensor, nn

from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.average_velocity import MeanFlowConfig, MeanFlowPolicy, ShortcutConfig, ShortcutPolicy
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.edm import EDMConfig, EDMPolicy, preconditioning
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.path import PathEstimate, prediction_target

PLANE = PolicySpec({"state": (1,)}, action_dim=2)
CHUNK = PolicySpec({"state": (3,)}, action_dim=2, horizon=4, action_horizon=2)
STATE = {"min": [-2.0] * 3, "max": [2.0] * 3}
ACTION = {"min": [-0.5, -3.0], "max": [0.5, 1.0]}


@dataclass(frozen=True)
class Gaussian:
    """N(mean, cov) in normalised units of its policy."""

    mean: tuple[float, ...]
    cov: tuple[tuple[float, ...], ...]

    @cached_property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, eigenvalues of the covariance, and eigenvectors as columns."""
        return torch.tensor(self.mean).double(), *torch.linalg.eigh(torch.tensor(self.cov).double())

    def draw(self, z: Tensor) -> Tensor:
        """Map standard normal noise to this distribution, like the probability flow."""
        mean, power, axes = self.parts
        return (mean + (z.double() @ axes * power.sqrt()) @ axes.T).to(z.dtype)

    def estimate(self, x: Tensor, a: Tensor, b: Tensor) -> PathEstimate:
        """Expected data and noise given `x = a * data + b * noise` `(B, 1, A)`, with `a` and `b` `(B, 1, 1)`."""
        mean, power, axes = self.parts
        x, a, b = x.double(), a.double(), b.double()
        along = (x - a * mean) @ axes / (a.square() * power + b.square())
        return PathEstimate(mean + a * (along * power) @ axes.T, b * along @ axes.T)

    def log_density(self, x: Tensor, t: float) -> Tensor:
        """Log-density of the noised data `(B, 1, A)` on the linear path, up to the constant with pi."""
        mean, power, axes = self.parts
        noised = t * t * power + (1 - t) ** 2
        return -0.5 * (((x.double() - t * mean)[:, 0] @ axes).square() / noised + noised.log()).sum(-1)


def round_(mean: Sequence[float], std: float) -> Gaussian:
    """An isotropic Gaussian."""
    size = len(mean)
    return Gaussian(tuple(mean), tuple(tuple(std**2 * (i == j) for j in range(size)) for i in range(size)))


class _Exact(nn.Module):
    def __init__(self, law: Gaussian, config: Any) -> None:
        super().__init__()
        self.law, self.config = law, config


class _Flow(_Exact):
    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        row = t.view(-1, 1, 1)
        return self.law.estimate(x, row, 1 - row).velocity.to(x.dtype)


class _Diffusion(_Exact):
    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        every = torch.logit(self.config.alpha_bars())
        level = (1 - t.double()) * self.config.train_steps - 1
        low = level.floor().clamp(0, self.config.train_steps - 2).long()
        log_snr = every[low] + (level - low) * (every[low + 1] - every[low])
        a, b = log_snr.sigmoid().sqrt().view(-1, 1, 1), (-log_snr).sigmoid().sqrt().view(-1, 1, 1)
        found = self.law.estimate(x, a, b)
        return prediction_target(self.config.prediction, found.data, found.noise, a, b).to(x.dtype)


class _EDM(_Exact):
    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        sigma = (4 * t.double()).exp().view(-1, 1, 1)
        c_skip, c_out, c_in = preconditioning(sigma, self.config.sigma_data)
        x_sigma = x / c_in
        data = self.law.estimate(x_sigma, torch.ones_like(sigma), sigma).data
        return ((data - c_skip * x_sigma) / c_out).to(x.dtype)


KINDS: dict[str, tuple[type[Any], type[Any], type[_Exact]]] = {
    "flow": (FlowConfig, FlowPolicy, _Flow),
    "diffusion": (DiffusionConfig, DiffusionPolicy, _Diffusion),
    "edm": (EDMConfig, EDMPolicy, _EDM),
}


def exact(kind: str, law: Gaussian, **settings: Any) -> Any:
    """A policy of a family with the closed form of `law`, in raw action units unless `settings` change that."""
    config_class, policy_class, network = KINDS[kind]
    policy = policy_class(config_class(**(RAW | settings)), PLANE)
    policy.backbone = network(law, policy.config)
    return policy


def scaled(policy: Any, offset: Sequence[float], scale: Sequence[float]) -> Any:
    """`policy` with the given action normaliser."""
    policy.action_normalizer.offset.copy_(torch.tensor(offset))
    policy.action_normalizer.scale.copy_(torch.tensor(scale))
    policy.action_normalizer.fitted.fill_(True)
    return policy


NETWORKS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "flow": (FlowConfig, FlowPolicy, {"steps": 4}),
    "diffusion": (DiffusionConfig, DiffusionPolicy, {"steps": 5, "prediction": "v"}),
    "edm": (EDMConfig, EDMPolicy, {"steps": 5}),
    "shortcut": (ShortcutConfig, ShortcutPolicy, {"steps": 2}),
    "meanflow": (MeanFlowConfig, MeanFlowPolicy, {}),
}


def network(kind: str, seed: int = 0, spec: PolicySpec = CHUNK, **settings: Any) -> Any:
    """An untrained policy of a family, fitted to fixed statistics."""
    config_class, policy_class, own = NETWORKS[kind]
    torch.manual_seed(seed)
    policy = policy_class(config_class(**({"hidden": (16, 16)} | own | settings)), spec)
    action = {name: (bound * 2)[: spec.action_dim] for name, bound in ACTION.items()}
    policy.fit_normalizer({"action": action, **dict.fromkeys(spec.observation, STATE)})
    return policy.eval()


def observations(rows: int, spec: PolicySpec = CHUNK) -> dict[str, Tensor]:
    """Random observations, the same for the same number of rows."""
    generator = torch.Generator().manual_seed(rows)
    return {
        key: torch.randn(rows, spec.obs_horizon, *shape, generator=generator) for key, shape in spec.observation.items()
    }


def nothing(rows: int) -> dict[str, Tensor]:
    """Observations of `exact` policies."""
    return {"state": torch.zeros(rows, 1, 1)}


def parameters(policy: Policy) -> list[Tensor]:
    """Copies of all parameters and buffers of a policy."""
    return [value.clone() for value in policy.state_dict().values()]
