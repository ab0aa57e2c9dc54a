"""On-policy rollouts: T chunk decisions of all environments, with what each decision was scored at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.rollout import Rollout
from robopolicy.policies.base import Observation, Sample
from robopolicy.sim.chunk import ChunkedSim

Act = Callable[..., Sample]


class RolloutSampler:
    """Collects `Rollout`s from a `ChunkedSim`; episodes run on across calls and are numbered by the seed rule."""

    def __init__(self, sim: ChunkedSim, *, decisions: int, seed: int = 0) -> None:
        """Reset `sim` and get ready.

        Args:
            sim: Simulator with chunk execution and observation history.
            decisions: T, chunk decisions per environment in one rollout.
            seed: First episode seed, and seed of the exploration noise.
        """
        self.sim = sim
        self.decisions = decisions
        self._generator = torch.Generator(sim.sim.device).manual_seed(seed)
        self._obs = sim.reset(seed)
        device = sim.sim.device
        self._return = torch.zeros(sim.sim.num_envs, device=device)  # undiscounted, of the running episodes
        self._length = torch.zeros(sim.sim.num_envs, dtype=torch.int64, device=device)
        self.env_steps = 0  # control steps executed since the start
        self._finished: list[dict[str, float]] = []

    def collect(self, act: Act) -> Rollout:
        """Play `decisions` chunks per environment; `act(obs, generator=...)` returns a `Sample`."""
        rows: dict[str, list[Any]] = {key: [] for key in ("obs", "record", "logp", "reward", "steps", "term", "trunc")}
        final: list[Observation] = []
        for _ in range(self.decisions):
            with torch.inference_mode(False), torch.no_grad():
                sample = act(self._obs, generator=self._generator)
            step = self.sim.step(sample.chunk)
            rows["obs"].append(self._obs)
            rows["record"].append(sample.record)
            rows["logp"].append(sample.logp)
            rows["reward"].append(step.reward)
            rows["steps"].append(step.steps)
            rows["term"].append(step.terminated)
            rows["trunc"].append(step.truncated)
            self._return += step.reward
            self._length += step.steps
            done = step.done
            if bool(done.any()):
                bootstrap = step.truncated & ~step.terminated
                if bool(bootstrap.any()):
                    final.append({key: value[bootstrap] for key, value in step.final_obs.items()})
                self._note_finished(done, step.info.get("success"))
            self._obs = step.obs
        steps = torch.stack(rows["steps"])
        self.env_steps += int(steps.sum())
        return Rollout(
            obs=_stack(rows["obs"]),
            record=_stack(rows["record"]),
            logp=torch.stack(rows["logp"]),
            reward=torch.stack(rows["reward"]),
            steps=steps,
            terminated=torch.stack(rows["term"]),
            truncated=torch.stack(rows["trunc"]),
            final_obs=_concat(final, self._obs),
            last_obs=dict(self._obs),
        )

    def episode_stats(self) -> dict[str, float]:
        """Means over the episodes finished since the last call, then forget them; empty when none finished."""
        if not self._finished:
            return {}
        keys = self._finished[0].keys()
        stats = {f"rollout/{key}": sum(row[key] for row in self._finished) / len(self._finished) for key in keys}
        stats["rollout/episodes"] = float(len(self._finished))
        self._finished = []
        return stats

    def _note_finished(self, done: Tensor, success: Tensor | None) -> None:
        for index in done.nonzero().flatten().tolist():
            row = {"return": float(self._return[index]), "length": float(self._length[index])}
            if success is not None:
                row["success"] = float(success[index])
            self._finished.append(row)
        self._return = torch.where(done, 0.0, self._return)
        self._length = torch.where(done, 0, self._length)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next rollout, the simulator included."""
        return {
            "sim": self.sim.state_dict(),
            "generator": self._generator.get_state(),
            "return": self._return,
            "length": self._length,
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next rollout equals that of the uninterrupted run."""
        self._obs = self.sim.load_state_dict(state["sim"])
        self._generator.set_state(state["generator"])
        self._return = state["return"]
        self._length = state["length"]
        self.env_steps = int(state["env_steps"])
        self._finished = []


def _stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def _concat(rows: list[Observation], like: Observation) -> Observation:
    if not rows:
        return {key: value[:0] for key, value in like.items()}
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
