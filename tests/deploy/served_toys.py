"""Small policies to serve: a shift that depends on every input, and a policy of one robot."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from robopolicy.deploy.client import Connection
from robopolicy.deploy.wire import Greeting
from robopolicy.spec import PolicySpec

SPEC = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, action_horizon=2)
IMAGES = PolicySpec({"state": (6,), "image.front": (3, 4, 4)}, action_dim=2, horizon=4, action_horizon=2, obs_horizon=2)


class Shift:
    """Position plus noise; a prefix is continued by its last action. Position 3 waits, 5 raises and 7 returns NaN."""

    def __init__(self, spec: PolicySpec = SPEC, *, noise: bool = True, prefix: bool = True) -> None:
        self.greeting = Greeting(spec, "shift", noise, prefix)
        self.batches: list[int] = []
        self.gate = threading.Event()  # position 3 waits for it
        self.gate.set()

    def chunks(self, obs: Any, noise: Any, prefix: Any, streams: Any) -> np.ndarray:
        self.batches.append(len(streams))
        position = obs["state"][:, -1:, :2]
        if (position == 3).any():
            self.gate.wait(10)
        if (position == 5).any():
            raise RuntimeError("out of memory\nand more")
        if noise is None:
            noise = np.stack([np.random.default_rng(key).normal(size=(4, 2)) for key in streams])
        chunk = position + noise
        chunk[position[:, 0, 0] == 7] = np.nan
        if prefix is not None:
            chunk[:, : prefix.shape[1]] = prefix
            chunk[:, prefix.shape[1] :] = prefix[:, -1:]
        return chunk


class OneRobot:
    """A `ChunkPolicy` of one robot."""

    spec, takes_prefix = SPEC, True

    def chunk(self, obs: Any, prefix: Any = None) -> np.ndarray:
        chunk = np.repeat(obs["state"][-1:, :2], 4, 0)
        if prefix is not None:
            chunk[: len(prefix)] = prefix
        return chunk

    def close(self) -> None:
        pass


def state(value: float = 1.0, rows: int = 1) -> dict[str, np.ndarray]:
    """Observations `(B, 1, 6)` filled with `value`."""
    return {"state": np.full((rows, 1, 6), value, np.float32)}


@contextmanager
def connected(url: str, timeout: float = 5.0) -> Iterator[Connection]:
    connection = Connection(url, timeout)
    connection.open()
    try:
        yield connection
    finally:
        connection.close()


def wait_until(happened: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until the condition holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
