"""DeepMind Control Suite (Tassa et al. 2018), with tasks `dm_control/<domain>-<task>`."""

from __future__ import annotations

from robopolicy_tasks.optional_envs import register_package_family


def register() -> None:
    """Register the family without importing dm_control."""
    register_package_family(
        "dm_control",
        "A task of the DeepMind Control Suite, e.g. dm_control/walker-walk.",
        rewards=("sparse",),
        success="none",
    )
