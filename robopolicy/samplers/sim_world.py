"""A vector simulator as a world of attempts: a task is the seed of an episode, a unit is a chunk.

An episode is a function of its seed and of the actions. To go on from the middle of an attempt, its first chunks are
therefore played again; no snapshot is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.data.rollout import GroupRollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Sample
from robopolicy.samplers.attempts import stack
from robopolicy.samplers.group import play_out
from robopolicy.samplers.protocols import Attempt, Task
from robopolicy.samplers.rollout import Act
from robopolicy.sim.chunk import ChunkedSim


class SimWorld:
    """Plays tasks in the environments of a simulator, as many at once as there are.

    Rows are chunks of K decisions, with observations and records as `extra["obs.NAME"]` and `extra["record.NAME"]`. The
    reward of an attempt is its return; its metrics are "return" and "length" [control steps]. A limit of units cuts
    the attempt after it was played.
    """

    def __init__(self, sim: ChunkedSim, act: Act, *, seed: int = 0) -> None:
        """Get ready.

        Args:
            sim: Simulator with chunk execution and observation history.
            act: `act(obs, generator=...)` returns a `Sample`; of the policy that is trained.
            seed: Of the exploration noise.
        """
        if not sim.sim.spec.seeded_episodes:
            raise UserError(f"The backend of {sim.sim.spec.task} cannot repeat an episode; choose another backend.")
        self.sim, self.act = sim, act
        self._generator = torch.Generator(sim.sim.device).manual_seed(seed)

    def play(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Attempt]:
        """Attempt every task once; its payload is the seed of the episode, by default its key."""
        at_once = self.sim.sim.num_envs
        attempts: list[Attempt] = []
        for start in range(0, len(tasks), at_once):
            block = list(tasks[start : start + at_once])
            idle = [block[-1]] * (at_once - len(block))  # environments that are not needed repeat the last task
            attempts += self._play([*block, *idle], units)[: len(block)]
        return attempts

    def _play(self, tasks: Sequence[Task], units: int | None) -> list[Attempt]:
        seeds = [task.key if task.payload is None else int(task.payload) for task in tasks]
        again = Repeat(self.act, [task.prefix for task in tasks])
        group = torch.arange(len(tasks), device=self.sim.sim.device)
        rollout = play_out(self.sim, again, self.sim.reset(seeds), self._generator, group)
        chunks = torch.stack(again.chunks)  # (T, N, H, A)
        return [self._attempt(task, rollout, chunks, env, units) for env, task in enumerate(tasks)]

    def _attempt(self, task: Task, rollout: GroupRollout, chunks: Tensor, env: int, units: int | None) -> Attempt:
        whole = int(rollout.played[:, env].sum())
        given = 0 if task.prefix is None else len(task.prefix["chunk"])
        count = whole if units is None else min(whole, given + units)
        logp = rollout.logp[:count, env]  # (T, K)
        reward = torch.zeros_like(logp)
        reward[:, -1] = rollout.reward[:count, env]
        extra = {f"obs.{name}": value[:count, env] for name, value in rollout.obs.items()}
        extra |= {f"record.{name}": value[:count, env] for name, value in rollout.record.items()}
        number = torch.arange(count, device=logp.device)[:, None].expand_as(logp)
        total, length = float(reward.sum()), float(rollout.steps[:count, env].sum())
        return Attempt(
            task,
            Decisions(logp, reward=reward, unit=number, extra=extra),
            reward=total,
            metrics={"return": total, "length": length},
            finished=count == whole,
            record=chunks[:count, env],
        )

    def branch(self, attempt: Attempt, unit: int) -> Task:
        """The task that repeats the first `unit` chunks, with their records, and goes on from there."""
        extra, decisions = attempt.decisions.extra, attempt.decisions
        record = {name: value[:unit] for name, value in extra.items() if name.startswith("record.")}
        prefix = {"chunk": attempt.record[:unit], "logp": decisions.logp_old[:unit], **record}
        return replace(attempt.task, prefix=prefix)

    def batch(self, attempts: Sequence[Attempt]) -> Decisions:
        """Rows of all attempts."""
        return stack(attempts)

    def state_dict(self) -> dict[str, Any]:
        """The generator; the simulator holds nothing, as every call resets it."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])


class Repeat:
    """Acts as a policy, except where an environment still has chunks to repeat; keeps what was played."""

    def __init__(self, act: Act, prefixes: Sequence[Any]) -> None:
        self.act, self.prefixes = act, prefixes
        self.chunks: list[Tensor] = []

    def __call__(self, obs: Observation, *, generator: torch.Generator) -> Sample:
        """The policy's sample with the rows of some environments replaced by recorded ones."""
        sample, moment = self.act(obs, generator=generator), len(self.chunks)
        chunk, logp = sample.chunk.clone(), sample.logp.clone()
        record = {name: value.clone() for name, value in sample.record.items()}
        for env, prefix in enumerate(self.prefixes):
            if prefix is not None and moment < len(prefix["chunk"]):
                chunk[env], logp[env] = prefix["chunk"][moment], prefix["logp"][moment]
                for name, value in record.items():
                    value[env] = prefix[f"record.{name}"][moment]
        self.chunks.append(chunk)
        return replace(sample, chunk=chunk, logp=logp, record=record)
