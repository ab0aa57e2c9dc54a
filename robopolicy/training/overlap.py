"""Simulation during learning (`sim.overlap=1`): the next data are collected on a second thread during an update.

The data of update k + 1 are collected during update k, with the weights before update k. Which weights act does not
depend on timing, so a run depends only on its seed. The thread acts with a copy of the algorithm and runs the
simulator; a replay buffer belongs to the learner, which writes the collected steps between two updates.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.data.batches import Rollout
from robopolicy.device import move, use_configured_threads
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Sample
from robopolicy.policies.noise import Randomness
from robopolicy.rollout.off_policy import StepLog
from robopolicy.rollout.on_policy import Act
from robopolicy.training.config import TrainConfig, section
from robopolicy.training.distributed import mean_metrics
from robopolicy.training.make_source import DataSource

SHARED = (torch.optim.Optimizer, torch.Generator)  # parts of an algorithm that `act` does not use
MAX_WEIGHT = 2.0  # of importance weights


def check_overlap(config: TrainConfig) -> None:
    """Raise a UserError if `sim.overlap` is set and the run does not support it."""
    if not config.sim.overlap:
        return
    name, settings = section("algorithm", config.algorithm)
    if not ALGORITHMS[name].supports_overlap:
        raise UserError(f"Algorithm '{name}' learns only from data of its present weights; set sim.overlap=0.")
    if getattr(settings, "recompute_chains", False):
        raise UserError(
            "algorithm.recompute_chains needs rollouts of present weights, unlike sim.overlap=1; unset one of them."
        )


class CollectingSource(DataSource, Protocol):
    """Data source that separates collecting from the rest of `next`."""

    def collects_next(self) -> bool:
        """Whether `next` begins with `collect`, with the actions of the algorithm."""
        ...

    def collect(self, act: Act) -> Any:
        """Run the simulator; the result is passed to `next`."""
        ...

    def next(self, algorithm: Algorithm, collected: Any = None) -> Any:
        """Return the next batch from the result of `collect`; None collects now."""
        ...


class ActingCopy:
    """Copy of an algorithm with the weights of the last `update`, which acts while the algorithm learns."""

    def __init__(self, algorithm: Algorithm) -> None:
        shared = {id(value): value for value in vars(algorithm).values() if isinstance(value, SHARED)}
        try:
            self._copy = copy.deepcopy(algorithm, shared)
        except (TypeError, RuntimeError) as error:  # e.g. a connection to a policy on another machine
            raise UserError(f"The policy of '{algorithm.name}' cannot be copied; set sim.overlap=0.") from error

    @torch.no_grad()
    def update(self, algorithm: Algorithm) -> None:
        """Copy all weights, running normalisers and schedules of `algorithm`."""
        torch._foreach_copy_(_tensors(self._copy), _tensors(algorithm))
        self._copy.updates = algorithm.updates

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk for exploration."""
        return self._copy.act(obs, generator=generator)


def _tensors(algorithm: Algorithm) -> list[Tensor]:
    """Parameters and buffers of all networks."""
    return [tensor for _, network in algorithm.networks() for tensor in (*network.parameters(), *network.buffers())]


@torch.no_grad()
def rescore(rollout: Rollout, algorithm: Algorithm) -> Rollout:
    """Set log-probabilities under the present weights, and importance weights: their ratios to the recorded ones.

    The first ratios of an update are then 1, as in decoupled PPO (Hilton et al. 2022). With ratios to the weights that
    acted, the previous update would use up the clip range and the target KL of the next one. Importance weights are at
    most `MAX_WEIGHT`; policies without a density have none.
    """
    policy: Any = algorithm.policy
    if not policy.scored_by_sample:
        return rollout
    obs, record = ({key: value.flatten(0, 1) for key, value in tree.items()} for tree in (rollout.obs, rollout.record))
    if policy.spec.hidden_dim:
        obs = policy.unroll_rnn(obs, rollout.shape[0])
    parts: list[Tensor] = []
    for start in range(0, rollout.reward.numel(), algorithm.config.batch_size):
        rows = slice(start, start + algorithm.config.batch_size)
        part = ({key: value[rows] for key, value in tree.items()} for tree in (obs, record))
        parts.append(policy.decisions(*part).logp)
    logp = torch.cat(parts).unflatten(0, rollout.shape)
    return replace(rollout, logp=logp, weight=(logp - rollout.logp).sum(-1).exp().clamp(max=MAX_WEIGHT))


@dataclass(frozen=True)
class Collected:
    """Data for one update."""

    data: Any
    stats: dict[str, float]  # means over the episodes that ended
    env_steps: int  # control steps of the simulator so far
    updates: int  # updates of the weights that acted


class OverlapSource:
    """Batches of `source`, collected during the previous update; the first one is collected without overlap."""

    def __init__(self, source: CollectingSource, device: torch.device) -> None:
        self.source = source
        self.env_steps = 0  # control steps whose data have been returned
        self._device = device
        # Kernels of the thread run on a stream of their own; both streams wait for each other where data change hands.
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout", initializer=use_configured_threads)
        self._acting: ActingCopy | None = None
        self._pending: Future[Collected] | None = None
        self._held: Any = None  # memory of the last data, which kernels of the learner may still read
        self._closing = threading.Event()
        self._stats: list[dict[str, float]] = []  # of the batches since the last metrics
        self._staleness = 0

    def next(self, algorithm: Algorithm) -> Any:
        """Return the batch that was collected during the last update, and start to collect the next one."""
        collected = self._take()
        if collected is not None and isinstance(collected.data, Rollout) and algorithm.updates < collected.updates:
            collected = None  # the run has restored earlier weights, so the ratios to this rollout may be extreme
        self._held = None
        if collected is None:
            self._submit(partial(self.source.next, algorithm), algorithm)
            collected = self._take()
            assert collected is not None
            self._start(algorithm)
            batch = collected.data
        else:
            self._start(algorithm)
            batch = self.source.next(algorithm, collected.data)
            if isinstance(batch, Rollout):
                batch = rescore(batch, algorithm)
        self._held = batch, collected.data
        self.env_steps = collected.env_steps
        self._stats += [collected.stats] if collected.stats else []
        self._staleness = algorithm.updates - collected.updates
        return batch

    def _start(self, algorithm: Algorithm) -> None:
        """Start to collect with the present weights, unless the next update is the last one."""
        if not self.source.collects_next() or algorithm.updates + 1 >= algorithm.total_updates:
            return
        if self._acting is None:
            self._acting = ActingCopy(algorithm)
        self._acting.update(algorithm)
        self._submit(partial(self.source.collect, partial(self._act, self._acting)), algorithm)

    def _submit(self, collect: Callable[[], Any], algorithm: Algorithm) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        self._pending = self._thread.submit(self._collect, collect, algorithm.updates)

    def _collect(self, collect: Callable[[], Any], updates: int) -> Collected:
        with self._on_stream():
            return Collected(collect(), self.source.metrics(), self.source.env_steps, updates)

    def _act(self, acting: ActingCopy, obs: Observation, *, generator: Randomness = None) -> Sample:
        if self._closing.is_set():
            raise RuntimeError("The source was closed during a rollout.")
        return acting.act(obs, generator=generator)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream

    def _take(self) -> Collected | None:
        """Wait for the data being collected, if any; an exception of the thread is raised here."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        collected = pending.result()
        self._join_streams()
        return collected

    def _join_streams(self) -> None:
        if self._stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._stream)

    def metrics(self) -> dict[str, float]:
        """Return means over the episodes of the batches since the last call, and the age of the last weights."""
        stats, self._stats = mean_metrics(self._stats), []
        return {**stats, "rollout/staleness": float(self._staleness)}

    def observations(self) -> Observation:
        """Return the first observations of training."""
        return self.source.observations()

    def state_dict(self) -> dict[str, Any]:
        """Wait for the thread; return the state of the source and the data for the next update."""
        pending = None
        if self._pending is not None and self._pending.exception() is None:  # else `next` raises it
            pending = self._pending.result()
        self._join_streams()
        collected = None
        if pending is not None:
            rollout = dict(vars(pending.data)) if isinstance(pending.data, Rollout) else None
            collected = {**vars(pending), "data": rollout}
        return {
            "source": self.source.state_dict(),  # after replay has received the collected steps
            "env_steps": self.env_steps,
            "stats": self._stats,
            "collected": collected,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`; without the state of the simulator, a stored rollout is discarded."""
        with self._on_stream():  # these tensors are freed by the thread
            exact = self.source.load_state_dict(state["source"])
        self.env_steps, self._stats = int(state["env_steps"]), list(state["stats"])
        collected, self._pending = state["collected"], None
        if exact and collected is not None:
            rollout = move(collected["data"], self._device)
            data = Rollout(**rollout) if rollout else StepLog(collected["env_steps"])
            self._pending = Future()
            self._pending.set_result(Collected(**{**collected, "data": data}))
        return exact

    def close(self) -> None:
        """Stop the thread at its next decision, and the simulator."""
        self._closing.set()
        self._thread.shutdown()
        self.source.close()
