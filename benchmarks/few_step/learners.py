"""Heads that imitate the same demonstrations, their students, and their samplers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TASK = "manipulation/lift"
Sampler = Mapping[str, Any]  # settings of the policy's configuration


@dataclass(frozen=True)
class Settings:
    """Budget, the same for all learners."""

    demonstrations: int = 10
    updates: int = 4000
    batch_size: int = 256
    lr: float = 1e-3
    horizon: int = 4
    action_horizon: int = 4
    episodes: int = 200


@dataclass(frozen=True)
class Learner:
    """A training method, and the samplers of its evaluation."""

    samplers: Mapping[str, Sampler]  # label -> settings
    policy: str = ""  # head that is cloned; or
    teacher: str = ""  # learner that is distilled or straightened
    algorithm: str = "bc"
    settings: Mapping[str, Any] = field(default_factory=dict)


def steps(*counts: int) -> dict[str, Sampler]:
    """Samplers that differ in their number of steps."""
    return {f"{count}": {"steps": count} for count in counts}


LEARNERS: dict[str, Learner] = {
    "flow": Learner(steps(1, 2, 4, 10, 100), policy="flow"),
    "reflow": Learner(steps(1, 2, 4), teacher="flow", algorithm="reflow"),
    "shortcut": Learner(steps(1, 2, 4), policy="shortcut"),
    "meanflow": Learner(steps(1, 2), policy="meanflow"),
    "consistency": Learner(steps(1, 2), policy="consistency"),
    "distilled": Learner(steps(1, 2), teacher="flow", algorithm="distill"),
    "diffusion": Learner(
        {
            "ddim-10": {"sampler": "ddim", "steps": 10},
            "ddim-100": {"sampler": "ddim", "steps": 100},
            "ddpm-100": {"sampler": "ddpm", "steps": 100},
        },
        policy="diffusion",
    ),
}
