"""Largest numbers that are accepted, so that a slip of the keyboard is refused instead of filling the memory."""

from __future__ import annotations

from robopolicy.errors import UserError

MOST = 1_000_000  # of anything counted that is not listed
LARGEST = {
    "seed": 2**32 - 1,  # what every generator in use tells apart
    "episodes": 10_000_000,
    "num_envs": 100_000,
    "threads": 1024,
    "image_size": 4096,  # pixels, within what every GL library draws
    "points": 9216,  # of a cloud: the pixels of its depth image
    "width": 4096,
    "height": 4096,
    "horizon": 10_000,
    "obs_horizon": 10_000,
    "capacity": 100_000_000,
}
UNBOUNDED = (  # they only say when something happens
    "updates",
    "env_steps",
    "every",
    "checkpoint_every",
    "warmup_steps",
    "offline_updates",
)


def check_count(name: str, value: int, least: int) -> None:
    """Refuse a count outside its range.

    Args:
        name: Option or dotted setting; its last part decides the largest value.
        value: The number.
        least: Smallest accepted value.
    """
    if value < least:
        raise UserError(f"{name} must be at least {least}, got {value}.")
    key = name.lstrip("-").replace("-", "_").rsplit(".", 1)[-1]
    most = LARGEST.get(key, MOST)
    if key not in UNBOUNDED and value > most:
        raise UserError(f"{name} must be at most {most}, got {value}.")
