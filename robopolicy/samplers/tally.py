"""Returns, lengths and successes of the episodes that end while experience is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from robopolicy.sim.chunk import ChunkStep


class EpisodeTally:
    """Follows N running episodes and averages those that have finished."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._return = torch.zeros(num_envs, device=device)  # undiscounted within chunks of discount 1
        self._length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._finished: list[dict[str, float]] = []

    def observe(self, step: ChunkStep) -> None:
        """Count one chunk of every environment."""
        self._return += step.reward
        self._length += step.steps
        done = step.done
        if not bool(done.any()):
            return
        success = step.info.get("success")
        for index in done.nonzero().flatten().tolist():
            row = {"return": float(self._return[index]), "length": float(self._length[index])}
            if success is not None:
                row["success"] = float(success[index])
            self._finished.append(row)
        self._return = torch.where(done, 0.0, self._return)
        self._length = torch.where(done, 0, self._length)

    def pop(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished."""
        if not self._finished:
            return {}
        keys = self._finished[0].keys()
        stats = {f"rollout/{key}": sum(row[key] for row in self._finished) / len(self._finished) for key in keys}
        stats["rollout/episodes"] = float(len(self._finished))
        self._finished = []
        return stats

    def state_dict(self) -> dict[str, Any]:
        """The running episodes."""
        return {"return": self._return, "length": self._length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._return, self._length, self._finished = state["return"], state["length"], []
