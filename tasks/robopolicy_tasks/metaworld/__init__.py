"""The 50 tabletop tasks of Meta-World (Yu et al. 2019) with their scripted experts."""

from __future__ import annotations

from robopolicy_tasks.optional_envs import register_package_task

# fmt: off
TASKS = (
    "assembly", "basketball", "bin-picking", "box-close", "button-press", "button-press-topdown",
    "button-press-topdown-wall", "button-press-wall", "coffee-button", "coffee-pull", "coffee-push", "dial-turn",
    "disassemble", "door-close", "door-lock", "door-open", "door-unlock", "drawer-close", "drawer-open",
    "faucet-close", "faucet-open", "hammer", "hand-insert", "handle-press", "handle-press-side", "handle-pull",
    "handle-pull-side", "lever-pull", "peg-insert-side", "peg-unplug-side", "pick-out-of-hole", "pick-place",
    "pick-place-wall", "plate-slide", "plate-slide-back", "plate-slide-back-side", "plate-slide-side", "push",
    "push-back", "push-wall", "reach", "reach-wall", "shelf-place", "soccer", "stick-pull", "stick-push", "sweep",
    "sweep-into", "window-close", "window-open",
)
# fmt: on


# The metadata of Meta-World require MuJoCo 3.3.0.
INSTALL = "pip install scipy; pip install --no-deps metaworld==3.1.1"


def register() -> None:
    """Register the family without importing Meta-World."""
    for task in TASKS:
        description, rewards = f"Meta-World: {task.replace('-', ' ')}.", ("sparse", "shaped")
        register_package_task("metaworld", f"{task}-v3", description, rewards, install=INSTALL, model_cameras=True)
