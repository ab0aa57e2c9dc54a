"""CAMEL on TD3: a coded prior bounds the actions of play, ever less often (Zhao et al. 2025).

As `camel_sac`, on the deterministic learner: what TD3 would play, noise included, is mapped into a band around the
action of the prior.

Use it as `camel_sac`, where td3 is what you would use without a prior. The deviations are the same.
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
    """Settings of TD3, and the mask."""

    mask: MaskConfig = field(default_factory=MaskConfig)


class CAMELTD3(TD3):
    """TD3 whose play is masked."""

    name = "camel_td3"
    config_class = CAMELTD3Config
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "zhao2025camel"
    config: CAMELTD3Config

    def __init__(self, config: CAMELTD3Config, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`, with the mask of the settings."""
        super().__init__(config, policy, total_updates=total_updates)
        self.mask = make_mask(config.mask, self.policy)

    @classmethod
    def init_hint(cls, config: CAMELTD3Config) -> str:
        """What to pass in place of a fresh policy, where there is no coded prior."""
        return init_hint(config.mask)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A uniform chunk, masked."""
        return masked(self.mask, super().warmup_action(obs, generator=generator), obs, generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of TD3, masked."""
        return masked(self.mask, super().act(obs, generator=generator), obs, generator)

    def update(self, batch: Transitions) -> Metrics:
        """As TD3; then the mask fades."""
        metrics = super().update(batch)
        return metrics | update_mask(self.mask, self, batch)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The parts of TD3 and the mask, with the prior in it."""
        return {**super().checkpoint_items(), "mask": self.mask}
