"""A chunk server as a `ChunkSource`, for the computer of a robot: no torch, and patient with a server that restarts."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.connection import Connection, reason_of
from robopolicy.deploy.contract import Observed
from robopolicy.deploy.statistics import Latency
from robopolicy.deploy.wire import Greeting
from robopolicy.errors import UserError
from robopolicy.limits import Natural, NotNegative, Ranged
from robopolicy.spec import PolicySpec

FIRST_WAIT, LONGEST_WAIT = 0.05, 1.0  # [s] before a server that is gone is asked again, doubled each time


@dataclass(frozen=True)
class ClientConfig(Ranged):
    """How long to wait for a server, and what to tell it."""

    timeout: NotNegative = 5.0  # [s] for one answer
    patience: NotNegative = 10.0  # [s] for which a server that is gone or late is asked again; 0 gives up at once
    seed: Natural = 0  # of the noise; a chunk is a function of seed, observation and how many requests came before
    deadline: NotNegative = 0.0  # [s] after which an answer is of no use; without its turn it is an error; 0: none


class ServerSource:
    """Chunks of the policy that a server serves."""

    def __init__(self, url: str, config: ClientConfig | None = None) -> None:
        """Connect and learn what is served.

        Args:
            url: `ws://HOST:PORT` or `wss://HOST:PORT`; the token is read from the variable ROBOPOLICY_TOKEN.
            config: How patient to be.

        Raises:
            UserError: It cannot be reached in time, refuses, or is no policy server.
        """
        self.config = config or ClientConfig()
        self.round_trip = Latency()  # from observation to chunk, without attempts that failed
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connection = Connection(url, self.config.timeout, self._check)
        self._greeting: Greeting | None = None
        with self._lock:
            self._greeting = self._patiently(self._connection.open)

    @property
    def spec(self) -> PolicySpec:
        """What it takes and gives."""
        return self.greeting.spec

    @property
    def greeting(self) -> Greeting:
        """What the server said of its policy."""
        assert self._greeting is not None
        return self._greeting

    @property
    def takes_prefix(self) -> bool:
        """As the server says."""
        return self.greeting.prefix

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """The chunk `(H, A)` for one observation `{key: (To, ...)}`.

        Waits while the server is gone, up to `patience`; meanwhile the chunks in the robot's buffer run out, and it
        holds still.

        Raises:
            UserError: The observation does not fit, or the server is gone, refuses, or serves another policy now.
        """
        spec = self.spec
        missing = [key for key in spec.observation if key not in obs]
        if missing:
            raise UserError(f"The policy needs the observation '{missing[0]}', got {', '.join(sorted(obs))}.")
        fields: dict[str, Any] = {"obs": {key: np.asarray(obs[key])[None] for key in spec.observation}}
        if prefix is not None and len(prefix):
            fields["prefix"] = np.asarray(prefix)[None]
        fields |= {"seed": self.config.seed, "deadline": self.config.deadline or None}
        with self._lock:
            chunk = self._patiently(lambda: self._timed(fields))
        if chunk.shape != (1, spec.horizon, spec.action_dim):
            raise UserError(f"{self._label} returned shape {chunk.shape} in place of one chunk.")
        if not np.isfinite(chunk).all():
            raise UserError(f"{self._label} returned a non-finite action.")
        return chunk[0].astype(np.float32, copy=False)

    def statistics(self) -> dict[str, Any]:
        """How the server fares: requests, errors, latency, batches, deadlines missed."""
        with self._lock:
            return dict(self._patiently(lambda: self._connection.ask(stats=True)).stats)

    def close(self) -> None:
        """Close the connection; a call that waits for the server in another thread gives up."""
        self._closed.set()
        self._connection.close()

    @property
    def _label(self) -> str:
        return f"The endpoint {self._connection.url}"

    def _timed(self, fields: dict[str, Any]) -> NDArray[Any]:
        start = time.monotonic()
        chunk = self._connection.ask(**fields).chunk
        self.round_trip.add(time.monotonic() - start)
        return chunk

    def _patiently(self, attempt: Any) -> Any:
        """What `attempt` returns, tried again with doubling waits while the server is gone."""
        until, wait = time.monotonic() + self.config.patience, FIRST_WAIT
        while not self._closed.is_set():
            try:
                return attempt()
            except OSError as error:
                left = until - time.monotonic()
                if left <= 0:
                    raise UserError(
                        f"{self._label} cannot be reached ({reason_of(error)}); start it, or check the address."
                    ) from error
                self._closed.wait(min(wait, left))
                wait = min(2 * wait, LONGEST_WAIT)
        raise UserError(f"The connection to {self._connection.url} has been closed.")

    def _check(self, greeting: Greeting) -> None:
        """Refuse another policy than the one this robot began with."""
        if self._greeting is not None and greeting != self._greeting:
            raise UserError(f"{self._label} now serves another policy ('{greeting.model}'); stop and connect again.")
