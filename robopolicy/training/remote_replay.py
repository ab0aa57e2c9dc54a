"""Environments of off-policy learners in other processes, on this machine or in a Ray cluster.

Each worker has a share of the environments and a copy of the policy. It collects the steps of the next update while the
learner takes its gradient steps, and receives new weights every `sim.weights_every` updates. The learner writes the
steps to its replay buffer in the order of the workers, so a run depends only on its seed and the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError, unknown_name
from robopolicy.rollout.off_policy import ReplaySampler, StepLog
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.config import TrainConfig
from robopolicy.training.distributed import mean_metrics
from robopolicy.training.make_source import SEEDS_PER_RANK
from robopolicy.training.parallel import WORKER_HANDLES, WorkerHandle, arrays_to_tensors, tensors_to_arrays

if TYPE_CHECKING:
    from robopolicy.algorithms.common.off_policy import OffPolicy


def check_workers(config: TrainConfig) -> None:
    """Raise a UserError for settings of workers that the run does not support."""
    count, backend = config.sim.num_workers, config.sim.worker_backend
    if backend not in WORKER_HANDLES:
        raise unknown_name("backend", backend, WORKER_HANDLES, "in sim.worker_backend")
    if count and ALGORITHMS[config.algorithm["name"]].data_source != "replay":
        raise UserError("sim.num_workers is for algorithms that learn from replay; start others with torchrun.")
    if count and config.sim.overlap:
        raise UserError("Workers always collect during the updates; set sim.overlap=0 with sim.num_workers.")
    if count and config.replay.return_max:
        raise UserError("Workers do not support replay.return_max; set it to 0, or sim.num_workers=0.")
    if count and config.sim.num_envs % count:
        raise UserError(f"sim.num_envs={config.sim.num_envs} is not divisible by sim.num_workers={count}.")


@dataclass(frozen=True)
class SimWorkers:
    """Workers of a run."""

    handles: Sequence[WorkerHandle]
    num_envs: int  # environments of all workers
    weights_every: int  # updates after which they receive new weights

    @classmethod
    def start(cls, config: TrainConfig) -> SimWorkers | None:
        """Start the workers, if the configuration has some; a missing Ray package raises a UserError."""
        count = config.sim.num_workers
        if not count:
            return None
        sim = replace(config.sim, num_envs=config.sim.num_envs // count, num_workers=0)
        make = partial(SimWorker, replace(config, sim=sim, device="cpu"))
        handles = [WORKER_HANDLES[config.sim.worker_backend](make) for _ in range(count)]
        return cls(handles, config.sim.num_envs, config.sim.weights_every)

    def close(self) -> None:
        """End the workers."""
        for handle in self.handles:
            handle.close()


class SimWorker:
    """Collects control steps with received weights."""

    def __init__(self, config: TrainConfig) -> None:
        """Build simulator and policy of a resolved configuration."""
        from robopolicy.training.build import load_episodes, seed_everything
        from robopolicy.training.learner import build_learner, simulator

        seed_everything(config)
        sim = simulator(config, config.sim.num_envs)
        episodes = load_episodes(config.dataset, config.task.name, config.task.reward) if config.dataset else None
        policy, self._algorithm, _ = build_learner(config, episodes, sim.spec, torch.device("cpu"))
        spec, gamma = policy.spec, self._algorithm.step_discount
        self._noise_repeat = config.replay.noise_repeat
        self._sim = ChunkedSim(sim, action_horizon=spec.action_horizon, obs_horizon=spec.obs_horizon, gamma=gamma)

    def restart(self, seed: int) -> None:
        """Start new episodes; `seed` is the first episode seed and the seed of exploration."""
        envs = self._sim.sim.num_envs
        unused = Replay(2 * envs, envs)  # the steps go to a log
        self._sampler = ReplaySampler(self._sim, unused, seed=seed, noise_repeat=self._noise_repeat)

    def collect(self, decisions: int, updates: int, weights: bytes | None) -> dict[str, Any]:
        """Run chunks with the `weights` after a number of `updates`; None keeps the present weights."""
        algorithm = cast("OffPolicy", self._algorithm)
        if weights is not None:
            load_weights(algorithm, weights)
            algorithm.updates = updates
        log = StepLog()
        self._sampler.collect(algorithm.act if updates else algorithm.warmup_action, decisions, log)
        if not algorithm.sample_spec.chunk_starts_only:
            for _, keywords in log.calls:
                keywords["record"] = {}
        totals = {"env_steps": self._sampler.env_steps, "stats": self._sampler.episode_stats()}
        return {"steps": tensors_to_arrays(log.calls), **totals}

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of the next steps; None if the backend cannot save its state."""
        try:
            return tensors_to_arrays(self._sampler.state_dict())
        except RuntimeError:
            return None

    def load_state_dict(self, state: Mapping[str, Any], updates: int, weights: bytes) -> None:
        """Restore `state_dict` and the weights, if any have been sent."""
        if weights:
            load_weights(self._algorithm, weights)
            self._algorithm.updates = updates
        self._sampler.load_state_dict(arrays_to_tensors(state))


class RemoteSampler:
    """Fills a replay buffer with the steps of workers, which collect the next ones during an update."""

    def __init__(self, sim: ChunkedSim, workers: SimWorkers, replay: Replay, *, seed: int) -> None:
        """Start the episodes of the workers; `sim` is of their task."""
        self.sim, self.workers, self.replay = sim, workers.handles, replay
        replay.end_episodes()
        self.env_steps = 0  # control steps in the buffer
        self._every = workers.weights_every
        self._weights, self._version = b"", -1  # last weights that were sent, and their updates
        self._running = self._unused = False  # whether workers are collecting; whether collected steps are unused
        self._staleness = 0
        self._counts = [0] * len(self.workers)  # control steps of each worker
        self._stats: list[dict[str, float]] = []
        for number, worker in enumerate(self.workers):
            _submit(worker, "restart", seed + SEEDS_PER_RANK * number)
        for worker in self.workers:
            _result(worker)

    def collect(self, algorithm: OffPolicy, decisions: int) -> None:
        """Write the collected steps to the buffer, and start to collect the next ones."""
        if not self._unused:
            self._start(algorithm, decisions)
        self._wait()
        self._unused, self._staleness = False, algorithm.updates - self._version
        if algorithm.updates + 1 < algorithm.total_updates:
            self._start(algorithm, decisions)

    def _start(self, algorithm: OffPolicy, decisions: int) -> None:
        weights = None
        if self._version < 0 or not 0 <= algorithm.updates - self._version < self._every:
            self._weights, self._version = dump_weights(algorithm), algorithm.updates
            weights = self.workers[0].share(self._weights)
        for worker in self.workers:
            _submit(worker, "collect", decisions, self._version, weights)
        self._running = self._unused = True

    def _wait(self) -> None:
        """Wait until the workers have finished, and write their steps to the buffer."""
        if not self._running:
            return
        self._running = False
        size = self.replay.lanes // len(self.workers)
        for number, worker in enumerate(self.workers):
            found = arrays_to_tensors(_result(worker))
            for (lanes, *arguments), keywords in found["steps"]:
                self.replay.add(lanes + number * size, *arguments, **keywords)
            self.env_steps += found["env_steps"] - self._counts[number]
            self._counts[number] = found["env_steps"]
            self._stats.append(found["stats"])

    def episode_stats(self) -> dict[str, float]:
        """Mean statistics of the episodes finished since the last call, and the age of the last weights in updates."""
        stats, self._stats = mean_metrics(self._stats), []
        return stats | {"rollout/staleness": float(self._staleness)}

    def state_dict(self) -> dict[str, Any]:
        """Wait for the workers, and return their states and the buffer."""
        self._wait()
        for worker in self.workers:
            _submit(worker, "state_dict")
        states = [_result(worker) for worker in self.workers]
        if None in states:
            raise RuntimeError("The backend of the workers cannot save its state.")
        weights = torch.from_numpy(np.frombuffer(self._weights, np.uint8).copy())  # none before the first rollout
        names = ("env_steps", "_version", "_unused", "_staleness", "_counts", "_stats")
        own = {name: getattr(self, name) for name in names}
        return {"workers": states, "replay": self.replay.state_dict(), "weights": weights, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; the next steps equal the ones of the uninterrupted run."""
        self.replay.load_state_dict(state["replay"])
        vars(self).update(state["own"])
        self._weights, self._running = bytes(state["weights"].numpy()), False
        shared = self.workers[0].share(self._weights)
        for worker, saved in zip(self.workers, state["workers"], strict=True):
            _submit(worker, "load_state_dict", tensors_to_arrays(saved), self._version, shared)
        for worker in self.workers:
            _result(worker)


def _submit(worker: WorkerHandle, name: str, *arguments: Any) -> None:
    _in_one_line(partial(worker.submit, name, *arguments))


def _result(worker: WorkerHandle) -> Any:
    return _in_one_line(worker.result)


def _in_one_line(call: Callable[[], Any]) -> Any:
    """Call a method of a worker; its failure raises a UserError with the last line of its message."""
    try:
        return call()
    except RuntimeError as error:
        raise UserError(f"A simulation worker failed: {str(error).strip().splitlines()[-1]}") from error


def dump_weights(algorithm: Algorithm) -> bytes:
    """Serialize the networks of `algorithm` as safetensors."""
    items = dict(algorithm.networks())
    tensors = {f"{name}/{key}": value for name, item in items.items() for key, value in item.state_dict().items()}
    return save({key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()})


def load_weights(algorithm: Algorithm, weights: bytes) -> None:
    """Load the result of `dump_weights`."""
    networks: dict[str, dict[str, Tensor]] = {}
    for key, value in load(weights).items():
        name, _, key = key.rpartition("/")
        networks.setdefault(name, {})[key] = value
    for name, item in algorithm.networks():
        if name in networks:
            item.load_state_dict(networks[name])
