"""Tasks of robosuite (Zhu et al. 2020) with one arm: `robosuite/<Task>` or `robosuite/<Task>-<Robot>`."""

from __future__ import annotations

from robopolicy_tasks.optional_envs import register_package_family

# The metadata of robosuite requires a release of mink that requires numpy below 2.
INSTALL = "pip install numba termcolor opencv-python; pip install --no-deps robosuite==1.5.2"


def register() -> None:
    """Register the family without importing robosuite."""
    register_package_family(
        "robosuite",
        "A task of robosuite, with a Panda or a given arm, e.g. robosuite/Lift-Sawyer.",
        rewards=("sparse", "shaped"),
        install=INSTALL,
        success="sparse",
    )
