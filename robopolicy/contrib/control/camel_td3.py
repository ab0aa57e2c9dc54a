"""CAMEL on TD3: a coded prior bounds the actions of play, ever less often (Zhao et al. 2025, S076).

As `camel_sac`, on the deterministic learner: what TD3 would play, noise included, is mapped into a band around the
action of the prior.

Use it as `camel_sac`, where td3 is what you would use without a prior. The deviations are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.contrib.control.action_masking import MaskConfig, MaskedPlay


@dataclass(frozen=True)
class CAMELTD3Config(TD3Config):
    """Settings of TD3, and the mask."""

    mask: MaskConfig = field(default_factory=MaskConfig)


class CAMELTD3(MaskedPlay, TD3):
    """TD3 whose play is masked."""

    name = "camel_td3"
    config_class = CAMELTD3Config
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "zhao2025camel"
