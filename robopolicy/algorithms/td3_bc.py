"""TD3+BC: TD3 on a dataset, with an actor that also imitates the actions of its batch (Fujimoto and Gu 2021).

The loss of the actor is `-alpha Q(s, pi(s)) / mean|Q|` plus the squared distance to the batch's chunk. That is all, and
a strong baseline.

Use it for offline data of one source, or of mixed quality with dense coverage. Where most of the data is bad, the bad
half holds the actor back as much as the good one helps: see prdc and a2pr. For multimodal data and any other head take
iql or idql.

Deviations from the paper: the target takes the least of the ensemble, of which there may be more than two; chunks
replace single actions; observations are normalised as the policy says.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.algorithms.frames.regularized_td3 import RegularizedTD3, RegularizedTD3Config
from robopolicy.data.batches import Transitions
from robopolicy.policies.base import Info


@dataclass(frozen=True)
class TD3BCConfig(RegularizedTD3Config):
    """Settings of TD3+BC; defaults are the paper's."""


class TD3BC(RegularizedTD3):
    """TD3 that imitates its batch."""

    name = "td3_bc"
    config_class = TD3BCConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "fujimoto2021td3bc"
    config: TD3BCConfig

    def penalty(self, batch: Transitions, chunk: Tensor) -> tuple[Tensor, Info]:
        """Squared distance to the batch's chunks."""
        return self.distance(chunk, batch.chunk, batch.mask), {}
