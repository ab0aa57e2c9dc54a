"""Latency curves: the score of a policy under inference latency.

One chunk is computed at a time. A chunk requested at control step s arrives at s + d, d = ceil(latency / control_dt).
Until then a `ChunkBuffer` executes the rest of earlier chunks, aligned by time; without any, the last action is
repeated. The next request follows `action_horizon` steps after the last one, or on arrival if that is later. The first
chunk of an episode has no delay: a robot starts when it has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.deploy.chunk_buffer import BLENDINGS, ChunkBuffer, delay_steps
from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.actors import Actor, PolicyActor, as_actor
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.report import Table, percent
from robopolicy.evaluation.result import EvalResult
from robopolicy.policies.base import Policy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.real_time_chunking import CONTINUABLE, act_with_prefix, can_continue, pad_prefix
from robopolicy.sim.contract import Observation, VectorSim

MAX_LATENCY_S = 3600.0  # latency [s]


class RealTimeChunkingActor(PolicyActor):
    """Actor with real-time chunking: chunks continue the actions being executed, without exploration noise."""

    def __init__(self, policy: Policy) -> None:
        """Wrap `policy`; a UserError is raised if it cannot continue a chunk."""
        if not can_continue(policy):
            raise _cannot_continue(f"'{policy.name}'")
        super().__init__(policy)
        self.prefixes: dict[int, NDArray[np.float64]] = {}  # episode seed -> (d, A) that the next chunk continues

    def _chunk(self, obs: Observation, seeds: Tensor, streams: PerRowGenerator) -> Tensor:
        spec = self.policy.spec
        parts = [
            pad_prefix(torch.from_numpy(self.prefixes[seed]).float()[None], spec.horizon)
            if seed in self.prefixes
            else pad_prefix(torch.zeros(1, 0, spec.action_dim), spec.horizon)
            for seed in seeds.tolist()
        ]
        reference = next(iter(obs.values()))
        given, weight = (torch.cat(part).to(reference.device) for part in zip(*parts, strict=True))
        return act_with_prefix(self.policy, obs, given, weight, generator=streams)


class DelayedActor:
    """Actor whose chunks arrive `delay` control steps after their request; times are in steps."""

    def __init__(self, actor: Actor, delay: int, blending: str = "replace") -> None:
        """Wrap `actor`.

        Args:
            actor: Actor that computes the chunks.
            delay: d, control steps from request to arrival.
            blending: See `robopolicy.deploy.chunk_buffer`; `rtc` needs a `RealTimeChunkingActor`.
        """
        self._actor, self._delay, self._blending = actor, delay, blending
        self.action_horizon = max(actor.action_horizon, delay)
        self.obs_horizon = actor.obs_horizon
        self.network_calls = actor.network_calls
        self.policy_calls = 0
        self.executed = self.repeated = 0  # control steps, and those without an action in time
        self._buffers: dict[int, ChunkBuffer] = {}  # by episode seed
        self._last: dict[int, NDArray[np.float64]] = {}

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """Return the actions `(R, action_horizon, A)` executed during and after the computation of the new chunks."""
        before, keys = self._actor.policy_calls, list(zip(seeds.tolist(), decisions.tolist(), strict=True))
        if isinstance(self._actor, RealTimeChunkingActor):
            self._actor.prefixes = {
                seed: self._buffers[seed].committed(decision * self.action_horizon, self._delay)
                for seed, decision in keys
                if decision and self._delay
            }
        chunks = self._actor(sim, obs, rows, seeds, decisions)
        self.policy_calls += self._actor.policy_calls - before
        pairs = zip(keys, chunks.cpu().numpy(), strict=True)
        actions = np.stack([self._execute(*key, chunk) for key, chunk in pairs])
        return torch.from_numpy(actions).to(chunks)

    def _execute(self, seed: int, decision: int, chunk: NDArray[Any]) -> NDArray[np.float64]:
        """Return the actions `(action_horizon, A)` of one episode after a decision, whose `chunk` is delayed."""
        start = decision * self.action_horizon
        arrival = self._delay if decision else 0
        if not decision:
            self._buffers[seed] = ChunkBuffer(1.0, chunk.shape[1], self._blending)
        buffer, actions = self._buffers[seed], np.zeros((self.action_horizon, chunk.shape[1]))
        for step in range(self.action_horizon):
            if step == arrival:
                buffer.put(chunk, start)
            action = buffer.action(start + step)
            self.repeated += action is None
            actions[step] = self._last[seed] = self._last[seed] if action is None else action
        if arrival == self.action_horizon:
            buffer.put(chunk, start)
        self.executed += self.action_horizon
        return actions


@dataclass(frozen=True)
class LatencyResult:
    """A score under latency."""

    result: EvalResult
    delay: int  # control steps
    repeated: float  # fraction of the control steps without an action in time


def latency_curve(
    policy: Policy | Actor,
    sim: VectorSim,
    latencies: Sequence[float],
    *,
    blending: str = "replace",
    episodes: int = 100,
    seed: int = 10_000,
    deterministic: bool = True,
) -> dict[float, LatencyResult]:
    """Evaluate the same episodes for each of `latencies` [s] from an observation to its chunk.

    Latencies are rounded up to control steps. `blending` handles overlapping chunks (`robopolicy.deploy.chunk_buffer`).
    Other arguments are as in `evaluate`.
    """
    check_latencies(latencies, blending)
    found: dict[float, LatencyResult] = {}
    with as_actor(policy, sim, deterministic=deterministic) as actor:
        for latency in latencies:
            delay = delay_steps(latency, sim.spec.control_dt)
            late = DelayedActor(require_continuation(policy) if blending == "rtc" else actor, delay, blending)
            result = evaluate(late, sim, episodes=episodes, seed=seed)
            found[latency] = LatencyResult(result, delay, late.repeated / late.executed)
    return found


def check_latencies(latencies: Sequence[float], blending: str) -> None:
    """Raise a UserError for latencies [s] out of range and unknown blendings."""
    if blending not in BLENDINGS:
        raise unknown_name("chunk blending", blending, BLENDINGS)
    if not all(0 <= latency <= MAX_LATENCY_S for latency in latencies):
        given = " ".join(f"{1e3 * latency:g}" for latency in latencies)
        raise UserError(f"Latencies must be between 0 and {1e3 * MAX_LATENCY_S:.0f} ms, got {given}.")


def require_continuation(policy: Policy | Actor, name: str = "") -> RealTimeChunkingActor:
    """Wrap a policy for the chunk blending `rtc`; a UserError with `name` is raised if it cannot continue a chunk."""
    if not isinstance(policy, Policy):
        raise _cannot_continue(f"'{name}'" if name else "an actor without a policy")
    return RealTimeChunkingActor(policy)


def _cannot_continue(what: str) -> UserError:
    return UserError(
        f"The chunk blending 'rtc' needs a policy that can continue a chunk, and {what} cannot; use {CONTINUABLE}, or "
        "choose another blending."
    )


def latency_table(curves: Mapping[str, Mapping[float, LatencyResult]]) -> Table:
    """Return the header and one row per policy: score and fraction of repeated actions at each latency."""
    first = next(iter(curves.values()))
    header = [f"{1e3 * latency:g} ms ({late.delay} steps)" for latency, late in first.items()]
    return ["policy", *header], [[label, *map(_cell, curve.values())] for label, curve in curves.items()]


def latency_facts(curves: Mapping[str, Mapping[float, LatencyResult]]) -> dict[str, Any]:
    """Return JSON-ready summaries by policy and latency in ms."""
    return {
        "latencies": {
            label: {
                f"{1e3 * latency:g}": {**late.result.summary(), "delay": late.delay, "repeated": late.repeated}
                for latency, late in curve.items()
            }
            for label, curve in curves.items()
        }
    }


def _cell(late: LatencyResult) -> str:
    success = late.result.success_interval()
    score = percent(success) if success else f"{late.result.return_interval():.4g}"
    return f"{score}, {100 * late.repeated:.0f} % of steps without an action" if late.repeated else score
