"""What a policy believes of actions that were seen through noise: the posterior mean, its score carried to clean data.

For a density pi blurred by Gaussian noise of variance v, Tweedie's formula says

    E[a | a + sqrt(v) n = y] = y + v * gradient of log (pi * N(0, v)) at y,

so the belief is the policy's score in the units of actions. Gaussian policies know it in closed form, denoising heads
have learned it (it is what they do), and any other policy counts as a Gaussian around the action it would play.
"""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy


def expected_chunk(policy: Policy, obs: Observation, chunk: Tensor, variance: Tensor, std: Tensor) -> Tensor:
    """What `policy` expects of its chunk at `obs`, having seen it as `chunk` under noise.

    Args:
        policy: Any policy.
        obs: Observations `{key: (B, To, ...)}`.
        chunk: Noisy chunk `(B, H, A)` [env units].
        variance: Of the noise `(A,)` [squared env units].
        std: Standard deviation `(A,)` that a policy without a density has around its action [env units].

    Returns:
        `(B, H, A)` [env units]; it lies between `chunk` (no noise) and what the policy does unasked (much noise).
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
    """Mean and standard deviation in env units; behind tanh those of its linearisation at the mode."""
    mean, log_std = policy.distribution(obs)
    spread = log_std.exp() * policy.action_normalizer.scale
    if policy.config.squash:
        spread = spread * (1 - mean.tanh().square())
    return policy.mode(obs), spread


def _denoises(policy: Policy) -> bool:
    """Whether `field` answers for the chunk alone, in units that are known."""
    known = isinstance(getattr(policy, "action_normalizer", None), Normalizer)
    return known and type(policy).field is not Policy.field and policy.noise_shape == (*_chunk(policy),)


def _chunk(policy: Policy) -> tuple[int, int]:
    return policy.spec.horizon, policy.spec.action_dim


def _denoised(policy: Policy, obs: Observation, chunk: Tensor, variance: Tensor) -> Tensor:
    """One call of the head; where noise differs between dimensions in its units, their mean counts."""
    normalizer: Normalizer = policy.action_normalizer  # type: ignore[assignment]
    sigma = (variance / normalizer.scale.square()).mean().sqrt()
    t = 1 / (1 + sigma)
    x = t * normalizer.normalize(chunk)
    velocity = policy.field(obs, x, t.expand(len(x)).to(torch.float32))
    return normalizer.denormalize(x + (1 - t) * velocity)
