"""Rejection of inherited settings that the fixed loss of an algorithm does not use."""

from __future__ import annotations

from robopolicy.algorithms.common.off_policy import OffPolicyConfig
from robopolicy.errors import UserError


def refuse_unused(algorithm: str, config: OffPolicyConfig, *names: str) -> None:
    """Raise `UserError` if a setting of `config` in `names` differs from its default."""
    for name in names:
        value, default = (str(getattr(owner, name)).lower() for owner in (config, type(config)))
        if value != default:
            raise UserError(
                f"The loss of algorithm '{algorithm}' has a fixed form, so algorithm.{name}={value} has no effect; "
                f"leave it out (default: {default})."
            )
