"""Rejection of inherited settings that the fixed loss of an algorithm does not use."""

from __future__ import annotations

from robopolicy.algorithms.common.off_policy import OffPolicyConfig
from robopolicy.schema import reject_unused


def refuse_unused(algorithm: str, config: OffPolicyConfig, *names: str) -> None:
    """Raise `UserError` if a setting of `config` in `names` differs from its default."""
    reject_unused(config, "algorithm", f"with algorithm={algorithm}, whose loss has a fixed form", *names)
