"""Asynchronous rollouts: a bound on the age of weights, and the queue between rollout workers and the learner.

A group is in flight from its reservation until the learner has used it. At most `(s + 1) batch` groups are in flight,
so no group is older than s updates if groups arrive in order; older groups are dropped. With s = 0 no group starts
before the weights of its update are published: the loop is synchronous.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from robopolicy.constraints import NonNegativeInt
from robopolicy.device import use_configured_threads
from robopolicy.plugins import Registry
from robopolicy.text.rollouts.protocols import RolloutEnv, Staleness, Trajectory
from robopolicy.text.rollouts.trajectories import from_dict, to_dict

Group = list[Trajectory]


class BoundedStaleness(Staleness):
    """At most `limit` updates old (AsyncFlow, Han et al. 2025); 0 is synchronous."""

    def __init__(self, limit: NonNegativeInt = 1) -> None:
        self.limit = limit

    def admit(self, version: int, current: int) -> bool:
        """Whether the weights are recent enough."""
        return current - version <= self.limit

    def in_flight(self, batch: int) -> int:
        """Return `(limit + 1) batch`."""
        return (self.limit + 1) * batch


STALENESS: Registry[type[Staleness]] = Registry("parts.staleness", {"bounded": BoundedStaleness})


@dataclass(frozen=True)
class VersionedWeights:
    """Weights for the next groups, with their version."""

    version: int
    weights: Any


class NoUsableGroupsError(RuntimeError):
    """Too many groups in succession were dropped."""


class RolloutQueue:
    """FIFO queue between threads: the learner publishes weights, the workers load them and put groups."""

    def __init__(
        self, staleness: Staleness, batch: int, weights: Any = None, *, max_dropped: int | None = None
    ) -> None:
        """Create the queue at version 0.

        Args:
            staleness: Bound on the age of weights.
            batch: Groups per update.
            weights: Weights that workers load, e.g. a state dict; never changed in place.
            max_dropped: Groups dropped in succession at which the queue closes; None: it never does.
        """
        self.staleness, self.batch, self.max_dropped = staleness, batch, max_dropped
        self.version, self.weights = 0, weights
        self.stale = 0  # number of groups dropped because of their age
        self._waiting: deque[Group] = deque()
        self._in_flight = 0  # reserved and not yet used by the learner
        self._taken = 0  # groups in flight that the learner has received
        self._dropped = 0  # groups dropped since the last one that was put
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def reserve(self, count: int) -> VersionedWeights | None:
        """Wait until `count` groups can start; None if the queue is closed."""
        with self._changed:
            limit = self.staleness.in_flight(self.batch)
            self._changed.wait_for(lambda: self._closed or self._in_flight + count <= limit)
            if self._closed:
                return None
            self._in_flight += count
            return VersionedWeights(self.version, self.weights)

    def put(self, groups: Sequence[Group], reserved: VersionedWeights, count: int) -> None:
        """Add the groups of a reservation of `count`; some may have been dropped."""
        tagged = [[replace(trajectory, version=reserved.version) for trajectory in group] for group in groups]
        with self._changed:
            self._in_flight -= count - len(groups)
            self._dropped = 0 if groups else self._dropped + count
            if self.max_dropped is not None and self._dropped >= self.max_dropped:
                self.close(NoUsableGroupsError(f"{self._dropped} groups in succession were dropped."))
            self._waiting.extend(tagged)
            self._changed.notify_all()

    def get(self, count: int) -> list[Group]:
        """Wait for `count` groups that are recent enough.

        Raises:
            RuntimeError: A worker has failed, or the queue was closed.
        """
        groups: list[Group] = []
        with self._changed:
            while len(groups) < count:
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if self._error is not None:
                    raise RuntimeError("A rollout worker has failed.") from self._error
                if not self._waiting:
                    raise RuntimeError("The queue is closed.")
                group = self._waiting.popleft()
                if self.staleness.admit(min(trajectory.version for trajectory in group), self.version):
                    groups.append(group)
                else:
                    self.stale += 1
                    self._in_flight -= 1
                    self._changed.notify_all()
            self._taken += count
        return groups

    def publish(self, weights: Any) -> None:
        """Publish the weights after an update, whose groups are no longer in flight."""
        with self._changed:
            self.version, self.weights = self.version + 1, weights
            self._in_flight, self._taken = self._in_flight - self._taken, 0
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """Release all waiting threads; with an error, `get` raises it."""
        with self._changed:
            self._closed, self._error = True, self._error or error
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Return version and waiting groups; unfinished groups are rolled out again."""
        with self._changed:
            waiting = [[to_dict(trajectory) for trajectory in group] for group in self._waiting]
            return {"version": self.version, "waiting": waiting, "stale": self.stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, before the workers start."""
        with self._changed:
            self.version, self.stale = int(state["version"]), int(state["stale"])
            self._waiting = deque([from_dict(item) for item in group] for group in state["waiting"])
            self._in_flight, self._taken = len(self._waiting), 0


class RolloutWorkers:
    """Threads that fill a queue, each with its own environment and copy of the policy."""

    def __init__(
        self,
        queue: RolloutQueue,
        rollout: Callable[[int, RolloutEnv], list[Group]],
        envs: Sequence[tuple[RolloutEnv, Callable[[Any], Any]]],
        chunk: int = 1,
    ):
        """Start the threads.

        Args:
            queue: Queue for the groups.
            rollout: Function `(count, env) -> groups`, e.g. `Collector.collect_groups`; called from several threads.
            envs: Environment of every thread, and a function that loads weights into its policy.
            chunk: Groups per call.
        """
        self._queue, self._rollout, self._chunk = queue, rollout, chunk
        self._threads = [threading.Thread(target=self._work, args=pair, daemon=True) for pair in envs]
        for thread in self._threads:
            thread.start()

    def _work(self, env: RolloutEnv, load: Callable[[Any], Any]) -> None:
        use_configured_threads()
        version = -1
        try:
            while (reserved := self._queue.reserve(self._chunk)) is not None:
                if reserved.version != version:
                    load(reserved.weights)
                    version = reserved.version
                self._queue.put(self._rollout(self._chunk, env), reserved, self._chunk)
        except BaseException as error:  # the learner waits for groups and raises it
            self._queue.close(error)

    def stop(self) -> None:
        """Close the queue and wait for the threads."""
        self._queue.close()
        for thread in self._threads:
            thread.join()
