"""CAMEL on SAC: a coded prior bounds the actions during training, with decreasing probability (Zhao et al. 2025).

The prior is a script or a trained policy that solves the task roughly. At first every decision is mapped into a band
around the prior's action. The fraction of masked decisions falls to 0, faster where the critic already prefers the
policy's own actions. The algorithm learns from the executed actions and is SAC otherwise.

Use it where random exploration finds no reward or would damage something, and a few lines of code do better. With many
demonstrations use rlpd. A wrong prior costs time, not the result, because the mask always fades. The prior is a
registered function (`robopolicy.policies.wrappers.black_box.register_callable`, `algorithm.mask.prior=NAME`) or the
policy of `init_from`. In the paper a language model writes it; this part is not implemented.

No public code was found. The algorithm is reconstructed from the abstract; own choices are the band of fixed width, the
map onto it and the schedule of epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.contrib.control.action_masking import MaskConfig, init_hint, make_mask, masked, update_mask
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class CAMELSACConfig(SACConfig):
    """Settings of SAC and of the mask."""

    mask: MaskConfig = field(default_factory=MaskConfig)


class CAMELSAC(SAC):
    """SAC with masked exploration."""

    name = "camel_sac"
    config_class = CAMELSACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "zhao2025camel"
    config: CAMELSACConfig

    def __init__(self, config: CAMELSACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy` with the configured mask."""
        super().__init__(config, policy, total_updates=total_updates)
        self.mask = make_mask(config.mask, self.policy)

    @classmethod
    def init_hint(cls, config: CAMELSACConfig) -> str:
        """Arguments to pass instead of a fresh policy if there is no coded prior."""
        return init_hint(config.mask)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a masked uniform chunk."""
        return masked(self.mask, super().warmup_action(obs, generator=generator), obs, generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a masked chunk of SAC."""
        return masked(self.mask, super().act(obs, generator=generator), obs, generator)

    def update(self, batch: Transitions) -> Metrics:
        """Update SAC, then fade the mask."""
        metrics = super().update(batch)
        return metrics | update_mask(self.mask, self, batch)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of SAC and the mask, including its prior."""
        return {**super().checkpoint_items(), "mask": self.mask}
