"""What the two forms of CAMEL share: play that a prior masks, and a mask that the critic fades out (S076)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from robopolicy.algorithms.frames.base import Metrics, Stateful, frozen_copy
from robopolicy.algorithms.frames.off_policy import OffPolicy
from robopolicy.constraints import Positive, Ranged
from robopolicy.contrib.control.prior_mask import MaskSchedule, PriorMask
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Observation, Policy, Sample
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.black_box import CallableConfig, CallablePolicy


@dataclass(frozen=True)
class MaskConfig(Ranged):
    """The prior and its band."""

    prior: str = ""  # name of a provided function, obs -> (B, 1, A); empty: the policy it starts from, frozen
    width: Positive = 0.3  # half the width of the band around the prior's actions, normalised
    schedule: MaskSchedule = field(default_factory=MaskSchedule)  # of the share of masked decisions


class MaskedPlay(OffPolicy):
    """Mixin: masks what another off-policy algorithm plays; what it learns from is what was executed."""

    policy: GaussianPolicy

    def __init__(self, config: Any, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train a squashed Gaussian `policy` with the algorithm, and mask as `config.mask` says."""
        super().__init__(config, policy, total_updates=total_updates)
        mask: MaskConfig = config.mask
        prior: Policy = frozen_copy(self.policy)
        if mask.prior:
            one = replace(self.policy.spec, horizon=1, execute=1)
            prior = CallablePolicy(CallableConfig(function=mask.prior, noise=False), one)
        self.mask = PriorMask(prior, mask.width, mask.schedule, self.policy.action_normalizer)

    @classmethod
    def wanted_base(cls, config: Any) -> str:
        """Without a coded prior the band lies around the starting policy, which must know something."""
        return "" if config.mask.prior else "init_from=CHECKPOINT or algorithm.mask.prior=NAME"

    def explore(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """What the algorithm explores with, masked."""
        return self._masked(super().explore(obs, generator=generator), obs, generator)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """What the algorithm plays, masked."""
        return self._masked(super().act(obs, generator=generator), obs, generator)

    def _masked(self, sample: Sample, obs: Observation, generator: Randomness) -> Sample:
        if self.mask.over:
            return sample
        return Sample.unscored(self.mask.apply_to(obs, sample.chunk, generator))

    def update(self, batch: Transitions) -> Metrics:
        """As the algorithm; then the mask fades where its critic prefers the policy's own actions."""
        metrics = super().update(batch)
        if not self.mask.over:
            with torch.no_grad():
                obs = next(batch.split(self.config.batch_size)).obs
                own = self.policy.mode(obs)
                better = self.critic.lowest(obs, own) >= self.critic.lowest(obs, self.mask.inside(obs, own))
                self.mask.observe(better.float().mean())
            metrics["mask/preferred"] = float(better.float().mean())
        return metrics | {"mask/epsilon": float(self.mask.epsilon)}

    def parts(self) -> Mapping[str, Stateful]:
        """The algorithm's parts and the mask, with the prior in it."""
        return {**super().parts(), "mask": self.mask}
