"""Calls in other processes, on this machine or in a Ray cluster."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import numpy as np
import torch

from robopolicy.optional import require
from robopolicy.shutdown import stop_signals

Item = TypeVar("Item")


def parallel_map(
    function: Callable[[Item], Any], items: Sequence[Item], *, jobs: int, ray: bool = False, gpu: bool = False
) -> Iterator[tuple[Item, Future[Any]]]:
    """Yield every item with the finished future of `function(item)`, in the order of completion.

    At most `jobs` processes run at a time, with `ray` in its cluster, and then each with a GPU if `gpu`. `function`
    belongs to an importable module, not to `__main__`.
    """
    if ray:
        yield from _map_in_ray(function, items, jobs, gpu)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=start_process) as pool:
        work = partial(_single_threaded, function)
        running = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(running):
                yield running[future], future
        finally:  # cancel the remaining items if the caller stops early
            pool.shutdown(wait=False, cancel_futures=True)


def _map_in_ray(
    function: Callable[[Item], Any], items: Sequence[Item], jobs: int, gpu: bool
) -> Iterator[tuple[Item, Future[Any]]]:
    ray = start_ray(GPU=int(gpu))
    task = ray.remote(_single_threaded).options(num_cpus=1, num_gpus=int(gpu))
    waiting, running = list(reversed(items)), dict[Any, Item]()
    while waiting or running:
        while waiting and len(running) < jobs:
            item = waiting.pop()
            running[task.remote(function, item)] = item
        (reference,), _ = ray.wait(list(running))
        future: Future[Any] = Future()
        try:
            future.set_result(ray.get(reference))
        except ray.exceptions.RayError as error:
            # Its class is derived from the class of the error in the task.
            future.set_exception(getattr(error, "cause", None) or error)
        yield running.pop(reference), future


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


class WorkerHandle(ABC):
    """An object in another process, with one call at a time; `make` builds it there."""

    @abstractmethod
    def submit(self, name: str, *arguments: Any) -> None:
        """Start a call of a method; `result` must follow."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the call and return its result; a failed or ended worker raises a RuntimeError."""

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method and return its result; see `result`."""
        self.submit(name, *arguments)
        return self.result()

    def share(self, value: Any) -> Any:
        """Prepare an argument for calls of several workers, so that it is sent once to each machine."""
        return value

    @abstractmethod
    def close(self) -> None:
        """Stop the worker."""


class ProcessHandle(WorkerHandle):
    """Worker in a process on this machine."""

    def __init__(self, make: Callable[[], Any]) -> None:
        context = get_context("spawn")
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_serve, args=(remote, make), daemon=True)
        self._process.start()
        remote.close()
        # At the exit of the interpreter, `multiprocessing` terminates processes, which this one ignores, and waits.
        self._kill = Finalize(self, self._process.kill, exitpriority=1)

    def submit(self, name: str, *arguments: Any) -> None:
        """Send the call over the pipe."""
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise RuntimeError("The process of a worker has ended.") from error

    def result(self) -> Any:
        """Receive the result from the pipe; see `WorkerHandle`."""
        try:
            failed, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("The process of a worker has ended.") from error
        if failed:
            raise RuntimeError(f"A worker failed:\n{value}")
        return value

    def close(self) -> None:
        """End the process."""
        self._kill()
        self._process.join(timeout=5)
        self._pipe.close()


class RayHandle(WorkerHandle):
    """Worker in a Ray actor with one CPU core."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._ray = start_ray(CPU=1)
        self._actor = self._ray.remote(_Actor).options(num_cpus=1).remote(make)
        self._reference: Any = None

    def submit(self, name: str, *arguments: Any) -> None:
        """Start a method of the actor."""
        self._reference = self._actor.call.remote(name, *arguments)

    def result(self) -> Any:
        """Wait for the actor; see `WorkerHandle`."""
        try:
            return self._ray.get(self._reference)
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(f"A worker failed:\n{error}") from error

    def share(self, value: Any) -> Any:
        """Store `value` in the cluster."""
        return self._ray.put(value)

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)


WORKER_HANDLES: dict[str, Callable[[Callable[[], Any]], WorkerHandle]] = {"process": ProcessHandle, "ray": RayHandle}


def start_ray(**needed: int) -> Any:
    """Connect to the cluster that `RAY_ADDRESS` names, or start a local one; returns the package.

    Warns if the `needed` resources are not free, since Ray then waits without a message.
    """
    ray = require("ray", "ray")
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    free = ray.available_resources()
    for name, count in needed.items():
        if free.get(name, 0) < count:
            warnings.warn(f"The Ray cluster has no free {name}; this waits until it has one.", stacklevel=2)
    return ray


class _Actor:
    """Ray actor that holds the object of a worker."""

    def __init__(self, make: Callable[[], Any]) -> None:
        torch.set_num_threads(1)
        self._worker = make()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method."""
        return getattr(self._worker, name)(*arguments)


def _serve(pipe: Connection, make: Callable[[], Any]) -> None:
    """Execute calls until the pipe is closed; the main process handles stop signals, and needs the workers for it."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    start_process()
    try:
        worker = make()
        while True:
            name, arguments = pipe.recv()
            pipe.send((False, getattr(worker, name)(*arguments)))
    except EOFError:
        return
    except BaseException:
        pipe.send((True, traceback.format_exc(limit=-3)))


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
