"""CAMEL on SAC: a coded prior bounds the actions of play, ever less often (Zhao et al. 2025).

A script or a trained policy says roughly what to do. At first every decision is mapped into a band around its action;
the share of such decisions falls, faster where the critic already prefers the policy's own actions, and ends at 0. The
learner sees the executed actions and is otherwise SAC.

Use it where plain exploration finds no reward, or would break something, and a few lines of code do better. With many
demonstrations use rlpd. A prior that is wrong costs time, not the result: the mask fades in any case. The prior is a
function known by name (`robopolicy.policies.wrappers.black_box.register_callable`, `algorithm.mask.prior=NAME`), or the
policy of `init_from`; the paper lets a language model write it, which is not rebuilt.

No public code was found. Reconstructed from the abstract; own choices are the band of fixed width, the map onto it and
how epsilon adapts.
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
    """Settings of SAC, and the mask."""

    mask: MaskConfig = field(default_factory=MaskConfig)


class CAMELSAC(SAC):
    """SAC whose play is masked."""

    name = "camel_sac"
    config_class = CAMELSACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "zhao2025camel"
    config: CAMELSACConfig

    def __init__(self, config: CAMELSACConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy`, with the mask of the settings."""
        super().__init__(config, policy, total_updates=total_updates)
        self.mask = make_mask(config.mask, self.policy)

    @classmethod
    def init_hint(cls, config: CAMELSACConfig) -> str:
        """What to pass in place of a fresh policy, where there is no coded prior."""
        return init_hint(config.mask)

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A uniform chunk, masked."""
        return masked(self.mask, super().warmup_action(obs, generator=generator), obs, generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """A chunk of SAC, masked."""
        return masked(self.mask, super().act(obs, generator=generator), obs, generator)

    def update(self, batch: Transitions) -> Metrics:
        """As SAC; then the mask fades."""
        metrics = super().update(batch)
        return metrics | update_mask(self.mask, self, batch)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The parts of SAC and the mask, with the prior in it."""
        return {**super().checkpoint_items(), "mask": self.mask}
