"""Posterior mean of noisy actions under a policy, i.e. its score transferred to clean actions.

For a density pi blurred by Gaussian noise of variance v, Tweedie's formula gives

    E[a | a + sqrt(v) n = y] = y + v * gradient of log (pi * N(0, v)) at y,

so the posterior mean is the policy's score in the units of actions. Gaussian policies have a closed form, denoising
heads have learned it, and any other policy counts as a Gaussian around its deterministic action.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy


def expected_chunk(policy: Policy, obs: Observation, chunk: Tensor, variance: Tensor, std: Tensor) -> Tensor:
    """Posterior mean of the chunk of `policy` at `obs`, given the noisy observation `chunk`.

    Args:
        policy: Any policy.
        obs: Observations `{key: (B, To, ...)}`.
        chunk: Noisy chunk `(B, H, A)` [env units].
        variance: Of the noise `(A,)` [squared env units].
        std: Standard deviation `(A,)` around the action of a policy without a density [env units].

    Returns:
        `(B, H, A)` [env units], between `chunk` (no noise) and the policy's own action (much noise).
    """
    if isinstance(policy, GaussianPolicy):
        mean, spread = _gaussian(policy, obs)
    elif _denoises(policy):
        return _denoised(policy, obs, chunk, variance)
    else:
        mean, spread = policy.act(obs, deterministic=True), std
    power = spread.square()
    return chunk + variance / (variance + power).clamp(min=1e-12) * (mean - chunk)


def _gaussian(policy: GaussianPolicy, obs: Observation) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation in env units; with tanh, of the linearisation at the mode."""
    mean, log_std = policy.distribution(obs)
    spread = log_std.exp() * policy.action_normalizer.scale
    if policy.config.squash:
        spread = spread * (1 - mean.tanh().square())
    return policy.mode(obs), spread


def _denoises(policy: Policy) -> bool:
    """Whether `field` denoises the chunk only, in units of a normaliser."""
    normalized = isinstance(getattr(policy, "action_normalizer", None), Normalizer)
    return normalized and type(policy).field is not Policy.field and policy.noise_shape == (*_chunk(policy),)


def _chunk(policy: Policy) -> tuple[int, int]:
    return policy.spec.horizon, policy.spec.action_dim


def _denoised(policy: Policy, obs: Observation, chunk: Tensor, variance: Tensor) -> Tensor:
    """Evaluate the head once, at the mean noise over the dimensions in its units."""
    normalizer: Normalizer = policy.action_normalizer  # type: ignore[assignment]
    sigma = (variance / normalizer.scale.square()).mean().sqrt()
    t = 1 / (1 + sigma)
    x = t * normalizer.normalize(chunk)
    velocity = policy.field(obs, x, t.expand(len(x)).to(torch.float32))
    return normalizer.denormalize(x + (1 - t) * velocity)
