"""Rollout workers of text tasks in other processes, on this machine or in a Ray cluster (AsyncFlow, Han et al. 2025).

The learner samples tasks, computes rewards and intervenes; a worker has a copy of the policy and of the task, and rolls
out the tasks that it receives. `RemoteRolloutEnv` is its local environment, which supports only rollouts, since
conversations stay in the worker. Weights are sent as safetensors, trajectories as arrays, numbers and text.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load, save

from robopolicy.core.decisions import Decisions
from robopolicy.optional import require
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextPolicy
from robopolicy.text.reward_runner import RewardError
from robopolicy.text.rollouts.protocols import Task, Trajectory
from robopolicy.text.rollouts.trajectories import from_dict, to_dict
from robopolicy.text.sim import TextSim
from robopolicy.text.text_env import TextEnv

Item = TypeVar("Item")


def parallel_map(
    function: Callable[[Item], Any], items: Sequence[Item], *, jobs: int
) -> Iterator[tuple[Item, Future[Any]]]:
    """Yield every item with the finished future of `function(item)`, in the order of completion.

    At most `jobs` processes run at a time. `function` belongs to an importable module, not to `__main__`.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=start_process) as pool:
        work = partial(_single_threaded, function)
        running = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(running):
                yield running[future], future
        finally:  # cancel the remaining items if the caller stops early
            pool.shutdown(wait=False, cancel_futures=True)


def start_process() -> None:
    """Initialize a process: one torch thread, and termination with the parent process."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _single_threaded(function: Callable[[Item], Any], item: Item) -> Any:
    """Call `function` and return its memory to the system; a long-running process may create a thousand models.

    The C library of Linux keeps the gaps between small blocks: 5 GB after ninety minutes of Meta-World.
    """
    try:
        return function(item)
    finally:
        gc.collect()
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)  # absent in musl


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


TASK = tuple(item.name for item in fields(Task))
_COUNTS = threading.Lock()  # several workers update the counts of one environment


@dataclass(frozen=True)
class WorkerSpec:
    """Construction parameters of a worker."""

    policy: str  # name in POLICIES
    config: Any  # config of the policy
    spec: PolicySpec
    task: str  # registered text task
    seed: int  # seed of the sampled tokens

    @classmethod
    def of(cls, policy: TextPolicy, task: str, seed: int) -> WorkerSpec:
        """Create the specification for rollouts of a task by `policy`."""
        return cls(policy.name, policy.config, policy.spec, task, seed)


class Worker:
    """Rollout worker in another process."""

    def __init__(self, spec: WorkerSpec) -> None:
        policy = POLICIES[spec.policy](spec.config, spec.spec)
        sim = make_sim(spec.task, SimOptions(num_envs=1))
        assert isinstance(sim, TextSim) and isinstance(policy, TextPolicy)
        self.env = policy.env_class(policy, sim.task, torch.Generator().manual_seed(spec.seed))

    def load(self, weights: bytes) -> None:
        """Load weights."""
        self.env.policy.load_state_dict(load(weights))

    def rollout(self, tasks: Sequence[Mapping[str, Any]], units: int | None) -> dict[str, Any]:
        """Roll out tasks; return trajectories, number of tokens and reward errors."""
        before = self.env.generated
        trajectories = self.env.rollout([Task(**arrays_to_tensors(task)) for task in tasks], units=units)
        self.env.completed.clear()
        return {
            "trajectories": [tensors_to_arrays(to_dict(trajectory)) for trajectory in trajectories],
            "tokens": self.env.generated - before,
            "reward_errors": [(error.key, error.kind, error.message) for error in self.env.reward_runner.pop_errors()],
        }


class WorkerHandle(ABC):
    """Interface to a worker."""

    @abstractmethod
    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the worker and return its result; a failed or ended worker raises a RuntimeError."""

    @abstractmethod
    def close(self) -> None:
        """Stop the worker."""


class ProcessHandle(WorkerHandle):
    """Worker in a process on this machine."""

    def __init__(self, spec: WorkerSpec) -> None:
        context = get_context("spawn")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, spec), daemon=True)
        self._process.start()
        remote.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method over the pipe; see `WorkerHandle`."""
        try:
            self._pipe.send((name, arguments))
            failed, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("The process of a rollout worker has ended.") from error
        if failed:
            raise RuntimeError(f"A rollout worker failed:\n{value}")
        return value

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(timeout=5)
        self._pipe.close()


class RayHandle(WorkerHandle):
    """Worker in a Ray actor with one CPU core; `RAY_ADDRESS` names a cluster, otherwise a local one is started."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._ray = require("ray", "ray")
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)
        self._actor = self._ray.remote(Worker).options(num_cpus=1).remote(spec)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the actor; see `WorkerHandle`."""
        try:
            return self._ray.get(getattr(self._actor, name).remote(*arguments))
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(f"A rollout worker failed:\n{error}") from error

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)


WORKER_HANDLES: dict[str, Callable[[WorkerSpec], WorkerHandle]] = {"process": ProcessHandle, "ray": RayHandle}


class RemoteRolloutEnv:
    """Environment of a worker; its counts and reward errors are added to the local environment `env`."""

    def __init__(self, handle: WorkerHandle, env: TextEnv) -> None:
        self._handle, self._env = handle, env

    def load(self, weights: bytes) -> None:
        """Load weights into the worker."""
        self._handle.call("load", weights)

    def rollout(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Trajectory]:
        """Roll out every task once."""
        plain = [tensors_to_arrays({name: getattr(task, name) for name in TASK}) for task in tasks]
        found = self._handle.call("rollout", plain, units)
        with _COUNTS:
            self._env.generated += found["tokens"]
            self._env.reward_runner.reward_errors += [RewardError(*error) for error in found["reward_errors"]]
        return [from_dict(arrays_to_tensors(trajectory)) for trajectory in found["trajectories"]]

    def batch(self, trajectories: Sequence[Trajectory]) -> Decisions:
        """Return the rows of all trajectories."""
        return self._env.batch(trajectories)

    def close(self) -> None:
        """Stop the worker."""
        self._handle.close()


def packed_weights(policy: TextPolicy) -> bytes:
    """Serialize parameters and buffers as safetensors; shared tensors, which it rejects, are cloned."""
    return save({name: value.detach().cpu().clone().contiguous() for name, value in policy.state_dict().items()})


def start_workers(
    policy: TextPolicy, task: str, env: TextEnv, *, count: int, backend: str, seed: int
) -> list[RemoteRolloutEnv]:
    """Start rollout workers for the local environment `env`; a missing Ray package raises a UserError."""
    specs = [WorkerSpec.of(policy, task, seed + number) for number in range(count)]
    return [RemoteRolloutEnv(WORKER_HANDLES[backend](spec), env) for spec in specs]


def tensors_to_arrays(value: Any) -> Any:
    """Convert all tensors of a tree to arrays, which are copied instead of shared between processes."""
    return _mapped(value, torch.Tensor, lambda tensor: tensor.cpu().numpy())


def arrays_to_tensors(value: Any) -> Any:
    """Inverse of `tensors_to_arrays`."""
    return _mapped(value, np.ndarray, lambda array: torch.from_numpy(array.copy()))


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(entry, kind, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(entry, kind, change) for entry in value)
    return value


def _serve(pipe: Connection, spec: WorkerSpec) -> None:
    """Execute calls until the pipe is closed."""
    start_process()
    try:
        worker = Worker(spec)
        while True:
            name, arguments = pipe.recv()
            pipe.send((False, getattr(worker, name)(*arguments)))
    except EOFError:
        return
    except BaseException:
        pipe.send((True, traceback.format_exc(limit=-3)))
