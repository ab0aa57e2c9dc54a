"""Rollout workers of text tasks in other processes, on this machine or in a Ray cluster (AsyncFlow, Han et al. 2025).

The learner samples tasks, computes rewards and intervenes; a worker has a copy of the policy and of the task, and rolls
out the tasks that it receives. A `RemoteRolloutEnv` represents it as an environment that supports only rollouts, since
conversations stay in the worker. Weights travel as safetensors and trajectories as plain arrays, so only numbers and
text come back.
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
    """Yield every item with the future of `function(item)`, done, in the order in which they end.

    Args:
        function: A function of an importable module, which `__main__` is not to another process.
        items: What to call it with.
        jobs: Processes at a time.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=start_process) as pool:
        work = partial(_single_threaded, function)
        running = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(running):
                yield running[future], future
        finally:  # where the reader stops early, nothing more begins
            pool.shutdown(wait=False, cancel_futures=True)


def start_process() -> None:
    """What every process begins with: one thread of torch, and an end when the one that waits for it ends."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _single_threaded(function: Callable[[Item], Any], item: Item) -> Any:
    """Call `function` and give the memory of what it leaves back: a long-running process may create a thousand models.

    The C library of Linux keeps the gaps between small blocks; after ninety minutes of Meta-World they were 5 GB.
    """
    try:
        return function(item)
    finally:
        gc.collect()
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)  # musl has none


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


TASK = tuple(item.name for item in fields(Task))
_COUNTS = threading.Lock()  # several workers share one environment


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker."""

    policy: str  # name in POLICIES
    config: Any  # of the policy
    spec: PolicySpec
    task: str  # registered text task
    seed: int  # of its choices

    @classmethod
    def of(cls, policy: TextPolicy, task: str, seed: int) -> WorkerSpec:
        """Specification for rollouts of a task by `policy`."""
        return cls(policy.name, policy.config, policy.spec, task, seed)


class Worker:
    """Rollout worker that lives in another process."""

    def __init__(self, role: WorkerSpec) -> None:
        policy = POLICIES[role.policy](role.config, role.spec)
        sim = make_sim(role.task, SimOptions(num_envs=1))
        assert isinstance(sim, TextSim) and isinstance(policy, TextPolicy)
        self.env = policy.env_class(policy, sim.task, torch.Generator().manual_seed(role.seed))

    def load(self, weights: bytes) -> None:
        """Take over weights."""
        self.env.policy.load_state_dict(load(weights))

    def rollout(self, tasks: Sequence[Mapping[str, Any]], units: int | None) -> dict[str, Any]:
        """Roll out tasks; returns trajectories, tokens and reward errors."""
        before = self.env.generated
        trajectories = self.env.rollout([Task(**arrays_to_tensors(task)) for task in tasks], units=units)
        self.env.completed.clear()
        return {
            "trajectories": [tensors_to_arrays(to_dict(trajectory)) for trajectory in trajectories],
            "tokens": self.env.generated - before,
            "reward_errors": [(error.key, error.kind, error.message) for error in self.env.reward_runner.pop_errors()],
        }


class WorkerHandle(ABC):
    """Handle of a worker."""

    @abstractmethod
    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the worker and wait for its result.

        Raises:
            RuntimeError: It failed, or is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop the worker."""


class ProcessHandle(WorkerHandle):
    """To a process on this machine."""

    def __init__(self, role: WorkerSpec) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, role), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """See `Line`."""
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
    """To an actor of Ray, on whatever machine has a core free; `RAY_ADDRESS` names a cluster, else one is started."""

    def __init__(self, role: WorkerSpec) -> None:
        self._ray = require("ray", "ray")
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False)
        self._actor = self._ray.remote(Worker).options(num_cpus=1).remote(role)

    def call(self, name: str, *arguments: Any) -> Any:
        """See `Line`."""
        try:
            return self._ray.get(getattr(self._actor, name).remote(*arguments))
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(f"A rollout worker failed:\n{error}") from error

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)


WORKER_HANDLES: dict[str, Callable[[WorkerSpec], WorkerHandle]] = {"process": ProcessHandle, "ray": RayHandle}


class RemoteRolloutEnv:
    """An environment in another process; its counts and reward errors are added to the local environment."""

    def __init__(self, line: WorkerHandle, home: TextEnv) -> None:
        self._line, self._home = line, home

    def load(self, weights: bytes) -> None:
        """Load weights into the worker."""
        self._line.call("load", weights)

    def rollout(self, tasks: Sequence[Task], *, units: int | None = None) -> list[Trajectory]:
        """Attempt every task once."""
        plain = [tensors_to_arrays({name: getattr(task, name) for name in TASK}) for task in tasks]
        found = self._line.call("rollout", plain, units)
        with _COUNTS:
            self._home.generated += found["tokens"]
            self._home.reward_runner.reward_errors += [RewardError(*error) for error in found["reward_errors"]]
        return [from_dict(arrays_to_tensors(trajectory)) for trajectory in found["trajectories"]]

    def batch(self, trajectories: Sequence[Trajectory]) -> Decisions:
        """Rows of all trajectories."""
        return self._home.batch(trajectories)

    def close(self) -> None:
        """Stop the worker."""
        self._line.close()


def packed_weights(policy: TextPolicy) -> bytes:
    """Parameters and buffers of a policy as safetensors, where what is shared would be refused."""
    return save({name: value.detach().cpu().clone().contiguous() for name, value in policy.state_dict().items()})


def start_workers(
    policy: TextPolicy, task: str, home: TextEnv, *, count: int, where: str, seed: int
) -> list[RemoteRolloutEnv]:
    """Start rollout workers.

    Raises:
        UserError: Ray is to be used and not installed.
    """
    roles = [WorkerSpec.of(policy, task, seed + number) for number in range(count)]
    return [RemoteRolloutEnv(WORKER_HANDLES[where](role), home) for role in roles]


def tensors_to_arrays(value: Any) -> Any:
    """The same tree with arrays in place of tensors, which would be shared and not copied."""
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


def _serve(pipe: Connection, role: WorkerSpec) -> None:
    """Answer calls until the pipe is closed."""
    start_process()
    try:
        player = Worker(role)
        while True:
            name, arguments = pipe.recv()
            pipe.send((False, getattr(player, name)(*arguments)))
    except EOFError:
        return
    except BaseException:
        pipe.send((True, traceback.format_exc(limit=-3)))
