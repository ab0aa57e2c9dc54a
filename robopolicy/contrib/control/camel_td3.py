"""CAMEL on TD3: a coded prior bounds the actions during training, with decreasing probability (Zhao et al. 2025).

The counterpart of `camel_sac` with a deterministic policy: the chunk of TD3, noise included, is mapped into a band
around the action of the prior.

Use it like `camel_sac`, for tasks where td3 is the choice without a prior. The deviations are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.contrib.control.action_masking import MaskConfig, init_hint, make_mask, masked, update_mask
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class CAMELTD3Config(TD3Config):
    """Settings of TD3 and of the mask."""

    mask: MaskConfig = field(default_factory=MaskConfig)


class CAMELTD3(TD3):
    """TD3 with masked exploration."""

    name = "camel_td3"
    config_class = CAMELTD3Config
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "zhao2025camel"
    config: CAMELTD3Config

    def __init__(self, config: CAMELTD3Config, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy` with the configured mask."""
        super().__init__(config, policy, total_updates=total_updates)
        self.mask = make_mask(config.mask, self.policy)

    @classmethod
    def init_hint(cls, config: CAMELTD3Config) -> str:
        """Arguments to pass instead of a fresh policy if there is no coded prior."""
        return init_hint(config.mask)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a masked uniform chunk."""
        return masked(self.mask, super().warmup_action(obs, generator=generator), obs, generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a masked chunk of TD3."""
        return masked(self.mask, super().act(obs, generator=generator), obs, generator)

    def update(self, batch: Transitions) -> Metrics:
        """Update TD3, then fade the mask."""
        metrics = super().update(batch)
        return metrics | update_mask(self.mask, self, batch)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of TD3 and the mask, including its prior."""
        return {**super().checkpoint_items(), "mask": self.mask}
