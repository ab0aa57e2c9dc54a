"""PushT: push a T-shaped block onto its target with a round finger (Florence et al. 2021, Chi et al. 2023)."""

from __future__ import annotations

from robopolicy_tasks.optional_envs import register_package_task


def register() -> None:
    """Register the tasks without importing gym-pusht."""
    descriptions = {
        "push_t": "PushT: push a T onto its target, which it must cover by 95 %.",
        "near": "PushT with the T near its target at the start: within 60 px and 35 degrees.",
    }
    for task, description in descriptions.items():
        register_package_task(
            "push_t", task, description, rewards=("sparse", "shaped"), cameras=("top",), module_name="gym_pusht"
        )
