"""Names of policies; filled by `robopolicy.policies`, read by whatever rebuilds a policy from its description."""

from __future__ import annotations

from typing import Any

from robopolicy.policies.base import Policy

POLICIES: dict[str, tuple[type[Any], type[Policy]]] = {}
"""Name -> (config class, policy class), constructed as `policy_class(config, spec)`."""
