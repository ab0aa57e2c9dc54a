"""CAMEL on SAC: a coded prior bounds the actions of play, ever less often (Zhao et al. 2025, S076).

A script or a trained policy says roughly what to do. At first every decision is mapped into a band around its action;
the share of such decisions falls, faster where the critic already prefers the policy's own actions, and ends at 0. The
learner sees the executed actions and is otherwise SAC.

Use it where plain exploration finds no reward, or would break something, and a few lines of code do better. With many
demonstrations use rlpd. A prior that is wrong costs time, not the result: the mask fades in any case. The prior is a
function known by name (`robopolicy.policies.wrappers.black_box.provide`, `algorithm.mask.prior=NAME`), or the policy of
`init_from`; the paper lets a language model write it, which is not rebuilt.

No public code was found. Reconstructed from the abstract; own choices are the band of fixed width, the map onto it and
how epsilon adapts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.contrib.control.action_masking import MaskConfig, MaskedPlay


@dataclass(frozen=True)
class CAMELSACConfig(SACConfig):
    """Settings of SAC, and the mask."""

    mask: MaskConfig = field(default_factory=MaskConfig)


class CAMELSAC(MaskedPlay, SAC):
    """SAC whose play is masked."""

    name = "camel_sac"
    config_class = CAMELSACConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "zhao2025camel"
