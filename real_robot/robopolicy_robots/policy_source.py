"""Chunk policies from a bundle, a checkpoint or a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.bundle import MANIFEST, open_bundle
from robopolicy.deploy.contract import ChunkPolicy, Observed
from robopolicy.errors import UserError
from robopolicy.plurals import counted
from robopolicy.sim.registry import NO_TASK, get_task
from robopolicy.spec import HIDDEN_STATE, IMAGE_PREFIX, TaskMetadata
from robopolicy_robots.policy_runner import InferenceResult, infer

ABANDONED_TIMEOUT = 120.0  # [s] longest request at the end of a run, such as the encoding of a demonstration


@dataclass(frozen=True)
class PolicyRequirements:
    """Requirements of a task on a policy."""

    task: str  # registered name
    observation: Mapping[str, tuple[int, ...]]  # shapes of all observations except images
    low: NDArray[Any]  # (A,) bounds of the actions
    high: NDArray[Any]
    control_dt: float  # [s] duration of an action


def compatibility_errors(source: ChunkPolicy, requirements: PolicyRequirements) -> list[str]:
    """Incompatibilities of a policy with a task, also of the metadata of its training where it has them."""
    spec = source.spec
    errors: list[str] = []
    own = {key: tuple(shape) for key, shape in spec.observation.items() if key != HIDDEN_STATE}
    for key, shape in own.items():
        found = requirements.observation.get(key)
        if found != shape and not key.startswith(IMAGE_PREFIX):
            errors.append(f"it expects '{key}' of shape {shape}, the task provides {found or 'nothing'}")
    if spec.action_dim != len(requirements.low):
        errors.append(f"it has {counted(spec.action_dim, 'action')} and the task {len(requirements.low)}")
    metadata = metadata_of(source)
    if metadata is None:
        return errors
    if _nominal(metadata.task) != _nominal(requirements.task):
        errors.append(f"it was trained on {metadata.task}")
    if metadata.control_dt is not None and abs(metadata.control_dt - requirements.control_dt) > 1e-9:
        errors.append(
            f"its actions last {1e3 * metadata.control_dt:g} ms, the task's {1e3 * requirements.control_dt:g} ms"
        )
    bounds = (metadata.action_low, requirements.low), (metadata.action_high, requirements.high)
    if any(len(theirs) and not (len(theirs) == len(ours) and np.allclose(theirs, ours)) for theirs, ours in bounds):
        errors.append("its actions have other bounds")
    return errors


def _nominal(task: str) -> str:
    """Name of a task without the randomization of its training."""
    try:
        return get_task(task).nominal or task
    except UserError:  # a task that is not installed here
        return task


def metadata_of(source: ChunkPolicy) -> TaskMetadata | None:
    """Metadata of the task that a policy was trained on, where the policy has them."""
    return getattr(source, "task_metadata", None)


def open_source(name: str, device: str = "cpu") -> ChunkPolicy:
    """Open a policy: `ws://HOST:PORT`, `wss://HOST:PORT`, or the folder of a bundle or checkpoint (which needs torch).

    Raises:
        UserError: The policy does not exist or cannot be loaded.
    """
    if name.startswith(("ws://", "wss://")):
        from robopolicy.deploy.client import ServerChunkPolicy

        return ServerChunkPolicy(name)
    if "://" in name:
        raise UserError(f"A policy server has an address like ws://HOST:PORT, got {name}.")
    if (Path(name) / MANIFEST).is_file():
        return open_bundle(name)
    if not Path(name).is_dir():
        raise UserError(f"There is no policy {name}: pass the folder of a bundle or a checkpoint, or ws://HOST:PORT.")
    from robopolicy.interop.sources import CheckpointChunkPolicy
    from robopolicy.training.checkpoint import load_policy

    policy, manifest = load_policy(name, device)
    metadata = manifest.task_metadata or (TaskMetadata(manifest.task) if manifest.task not in ("", NO_TASK) else None)
    return CheckpointChunkPolicy(policy, task_metadata=metadata)


def without_device(name: str) -> str | None:
    """Return why `open_source` has no choice of a device for this policy; None for a checkpoint."""
    if "://" in name:
        return "with a policy server, which has its own device"
    return "with a bundle, which runs on the CPU" if (Path(name) / MANIFEST).is_file() else None


class SharedChunkPolicy:
    """Chunk policy that several runners use in sequence: closing a runner does not close it, and calls never overlap.

    A runner abandons a request that takes too long, and the next runner waits for its end.
    """

    def __init__(self, source: ChunkPolicy) -> None:
        self.spec, self.takes_prefix = source.spec, source.takes_prefix
        self.source, self._lock = source, threading.Lock()

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Call the policy."""
        with self._lock:
            return self.source.chunk(obs) if prefix is None else self.source.chunk(obs, prefix)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait for the end of an abandoned request, at most `ABANDONED_TIMEOUT`, and let no other start."""
        acquired = self._lock.acquire(timeout=ABANDONED_TIMEOUT)
        try:
            yield
        finally:
            if acquired:
                self._lock.release()

    def close(self) -> None:
        """Do nothing: the owner closes the policy."""


class SyncRunner:
    """Synchronous inference for a robot in lockstep, whose time does not pass during inference."""

    busy = False
    latency = 0.0

    def __init__(self, source: ChunkPolicy) -> None:
        self.spec, self.takes_prefix = source.spec, source.takes_prefix
        self._source = source
        self._result: InferenceResult | None = None

    def request(self, obs: Observed, observed: float, prefix: NDArray[Any] | None = None) -> bool:
        """Compute the chunk for `obs`."""
        self._result = infer(self._source, {key: np.asarray(value) for key, value in obs.items()}, observed, prefix)
        return True

    def poll(self) -> InferenceResult | None:
        """Return the result once, else None."""
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """Close the policy."""
        self._source.close()
