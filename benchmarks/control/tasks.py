"""Tasks of the control benchmark, and the scale of their returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ControlTask:
    """One task with the returns that scores 0 and 1 stand for."""

    name: str  # of the family `locomotion`
    random: float  # mean return of random actions
    expert: float  # mean return of a trained SAC

    @property
    def task(self) -> str:
        """Registered name."""
        return f"locomotion/{self.name}"

    def score(self, value: float) -> float:
        """A return on the scale from 0 (random) to 1 (expert)."""
        return (value - self.random) / (self.expert - self.random)


# Reference returns of D4RL (Fu et al. 2020), the usual scale of normalised scores for these robots.
ROBOTS = {
    task.name: task
    for task in (
        ControlTask("hopper", -20.27, 3234.3),
        ControlTask("half_cheetah", -280.18, 12135.0),
        ControlTask("walker2d", 1.63, 4592.3),
        ControlTask("ant", -325.6, 3879.7),
    )
}
TASKS = {name: ROBOTS[name] for name in ("hopper", "half_cheetah", "walker2d")}  # of the table with short budgets
