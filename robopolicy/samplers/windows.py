"""Attempts played whole or in pieces: flat, in context windows, unit by unit, and over several batches."""

from __future__ import annotations

from collections.abc import Sequence

from robopolicy.samplers.protocols import Attempt, Task, Topology, World


class Flat(Topology):
    """Independent attempts."""

    def rollout(self, world: World, tasks: Sequence[Task]) -> list[Attempt]:
        """All at once."""
        return world.play([task for task in tasks for _ in range(task.budget)])
