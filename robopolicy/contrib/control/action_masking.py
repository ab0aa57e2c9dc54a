"""Action masking shared by both forms of CAMEL: a band around a prior, which fades as the critic improves.

Source: Zhao et al. 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from robopolicy.algorithms.common.algorithm import Metrics, frozen_copy
from robopolicy.algorithms.sac import SAC
from robopolicy.algorithms.td3 import TD3
from robopolicy.constraints import Positive, Validated
from robopolicy.contrib.control.prior_mask import MaskSchedule, PriorMask
from robopolicy.data.batches import Transitions
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.black_box import CallableConfig, CallablePolicy


@dataclass(frozen=True)
class MaskConfig(Validated):
    """The prior and the band around its actions."""

    prior: str = ""  # name of a registered function, obs -> (B, 1, A); empty: a frozen copy of the initial policy
    width: Positive = 0.3  # half the width of the band around the prior's actions, in normalised units
    schedule: MaskSchedule = field(default_factory=MaskSchedule)  # of the fraction of masked decisions


def make_mask(config: MaskConfig, policy: GaussianPolicy) -> PriorMask:
    """Build the mask around the prior of `config` for the actions of `policy`."""
    prior: Policy = frozen_copy(policy)
    if config.prior:
        one = replace(policy.spec, horizon=1, action_horizon=1)
        prior = CallablePolicy(CallableConfig(function=config.prior, noise=False), one)
    return PriorMask(prior, config.width, config.schedule, policy.action_normalizer)


def init_hint(config: MaskConfig) -> str:
    """Arguments that a run without a coded prior needs; a band around a fresh policy has no use."""
    return "" if config.prior else "init_from=CHECKPOINT or algorithm.mask.prior=NAME"


def masked(mask: PriorMask, sample: Sample, obs: Observation, generator: Randomness) -> Sample:
    """Map a random part of the rows of `sample` into the band. The result holds the executed actions."""
    if mask.finished:
        return sample
    return Sample.unscored(mask.apply_to(obs, sample.chunk, generator))


def update_mask(mask: PriorMask, algorithm: SAC | TD3, batch: Transitions) -> Metrics:
    """Fade the mask where the critic prefers the policy's own actions, on the first minibatch of `batch`."""
    metrics: Metrics = {}
    if not mask.finished:
        with torch.no_grad(), evaluation_mode(algorithm.critic):
            obs = next(batch.split(algorithm.config.batch_size)).obs
            own = algorithm.policy.mode(obs)
            better = algorithm.critic.min_q(obs, own) >= algorithm.critic.min_q(obs, mask.inside(obs, own))
            mask.observe(better.float().mean())
        metrics["mask/policy_preferred_fraction"] = float(better.float().mean())
    return metrics | {"mask/epsilon": float(mask.epsilon)}
