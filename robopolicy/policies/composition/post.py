"""Operations on a composed policy with one more checkpoint, by name. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from robopolicy.plugins import Registry

if TYPE_CHECKING:
    from robopolicy.policies.base import Policy

    PostComposition = Callable[[Policy, Policy, Mapping[str, Any]], Policy]

POST_COMPOSITION: Registry[PostComposition] = Registry("post_composition", {})
"""Functions of the composed policy, the policy of the checkpoint, and settings by name, which may be empty.

A function returns the policy that replaces the composed one, or raises a `UserError` if the checkpoint does not fit.
"""
