"""Recipe parts for masked diffusion: a mask, a surrogate and an intervention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import Fraction, NonNegative, PositiveInt, Seed
from robopolicy.core.decisions import Decisions
from robopolicy.core.ratios import Bound, count_for_fraction, topk_mask
from robopolicy.core.surrogates import SurrogateOut, nothing_clipped
from robopolicy.text.rollouts.protocols import HINTED, Intervention, RolloutEnv, Trajectory, require_capability


@dataclass(frozen=True)
class UncertainPrefix:
    """Keep the share of given decisions, `extra[key]` bool (N, T), with the highest entropy, and all others.

    Source: IGPO, Zhao et al. 2025.
    """

    key: str
    share: Fraction = 0.2

    def __call__(self, decisions: Decisions, advantage: Tensor, log_ratio: Tensor) -> Tensor:
        """Compute the mask, bool `(N, T)`."""
        given = decisions.require_extra(self.key, per_decision=True).expand(decisions.shape) & decisions.valid()
        return ~given | topk_mask(decisions.require("entropy"), given, count_for_fraction(given, self.share))


def linear_bound(log_ratio: Tensor, advantage: Tensor, low: Bound, high: Bound) -> SurrogateOut:
    """Compute a lower bound of the importance-weighted objective for log-ratios that are averages of samples.

    Source: BGPO, Lin et al. 2025.

    For policies whose log-likelihood is an expectation (diffusion losses): columns are samples with noise and time
    shared by both policies, and `sequence_mean` aggregates. By Jensen, `exp(mean)` is above `1 + mean`, which bounds
    positive advantages, and below the mean of `exp`, which bounds negative ones. The bounds of the ratio are ignored.
    """
    return SurrogateOut(
        -advantage * torch.where(advantage < 0, log_ratio.exp(), 1.0 + log_ratio), nothing_clipped(log_ratio)
    )


class Inpaint(Intervention):
    """Replacement of failures by successful completions around given pieces of a demonstration.

    Source: IGPO, Zhao et al. 2025.

    Only masked-diffusion texts and denoised chunks support this.
    """

    def __init__(self, low: NonNegative = 0.2, high: NonNegative = 0.6, count: PositiveInt = 4, seed: Seed = 0) -> None:
        """Validate and store the options.

        Args:
            low: Smallest given share.
            high: Largest given share.
            count: Attempts, the maximum number of replacements.
            seed: Seed of the shares.
        """
        self.low, self.high, self.count = low, high, count
        self._generator = torch.Generator().manual_seed(seed)

    def applies(self, rewards: Tensor) -> bool:
        """Whether all rollouts failed."""
        return bool((rewards <= 0.5).all())

    def apply(self, group: Sequence[Trajectory], env: RolloutEnv) -> list[Trajectory]:
        """Replace the first trajectories by successful completions."""
        shares = torch.rand(min(self.count, len(group)), generator=self._generator)
        shares = self.low + (self.high - self.low) * shares
        requests = [require_capability(env, "inpaint")(group[0].task, share) for share in shares.tolist()]
        filled = [
            trajectory
            for trajectory in env.rollout([task for task in requests if task is not None])
            if trajectory.success
        ]
        return [*(replace(trajectory, source=HINTED) for trajectory in filled), *group[len(filled) :]]

    def state_dict(self) -> dict[str, Any]:
        """Return the generator state."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])
