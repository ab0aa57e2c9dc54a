"""Returns, lengths, successes and other outcomes of the episodes that end while experience is gathered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.device import move
from robopolicy.sim.chunk import ChunkStep
from robopolicy.sim.contract import LOG_PREFIX, VectorSim

OUTCOMES = ("success", "diverged")  # of `Step.info`, averaged over episodes beside what the simulator logs


class EpisodeTally:
    """Follows the running episodes of a simulator and averages those that have finished."""

    def __init__(self, sim: VectorSim) -> None:
        self._return = torch.zeros(sim.num_envs, device=sim.device)
        self._length = torch.zeros(sim.num_envs, dtype=torch.int64, device=sim.device)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}  # total over finished episodes, and their number
        self._exact = sim.spec.final_obs_exact

    def observe(self, step: ChunkStep) -> bool:
        """Count one chunk of every environment; returns whether any episode has ended."""
        self._return += step.earned
        self._length += step.steps
        done = step.done
        if not bool(done.any()):
            return False
        ended = {"return": self._return, "length": self._length}
        ended |= {key: value for key, value in step.info.items() if key in OUTCOMES or key.startswith(LOG_PREFIX)}
        nothing = torch.zeros((), dtype=torch.float64, device=done.device)
        for key, value in ended.items():
            total, count = self._sums.get(key, (nothing, nothing))
            # Totals of whole batches: a simulator on a GPU ends episodes in most steps, and waits for no row of them.
            self._sums[key] = total + torch.where(done, value, 0).sum(dtype=torch.float64), count + done.sum()
        self._return = torch.where(done, 0.0, self._return)
        self._length = torch.where(done, 0, self._length)
        return True

    def pop(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished.

        `rollout/diverged` is the share of episodes that ended because the physics did. `rollout/final_obs_exact` is
        there, and 0, where the simulator hides the last observation of an episode: values of episodes cut by the time
        limit are then taken from the observation before it.
        """
        if not self._sums:
            return {}
        stats = {f"rollout/{key}": float(total) / float(count) for key, (total, count) in self._sums.items()}
        stats["rollout/episodes"] = float(self._sums["return"][1])
        if not self._exact:
            stats["rollout/final_obs_exact"] = 0.0
        self._sums = {}
        return stats

    def state_dict(self) -> dict[str, Any]:
        """The running episodes, and the totals of those that `pop` has not reported yet."""
        return {"return": self._return, "length": self._length, "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._return, self._length, self._sums = move(
            (state["return"], state["length"], dict(state["sums"])), self._return.device
        )
