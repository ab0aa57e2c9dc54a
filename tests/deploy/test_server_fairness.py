"""One client never hurts another: shares of calls, latency next to the largest requests, and a clean shutdown."""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from served_toys import SPEC, Shift, connected, state

from robopolicy.deploy.server import ServerConfig, running
from robopolicy.deploy.wire import Greeting
from robopolicy.errors import UserError


class Timed:
    """Policy whose calls take a fixed time and a time per row [s]."""

    def __init__(self, fixed: float, per_row: float) -> None:
        self.fixed, self.per_row = fixed, per_row
        self.greeting = Greeting(SPEC, "timed")
        self.rows: list[int] = []

    def chunks(self, obs: Any, noise: Any, prefix: Any, streams: Any) -> np.ndarray:
        self.rows.append(len(streams))
        time.sleep(self.fixed + self.per_row * len(streams))
        return np.zeros((len(streams), 4, 2), np.float32)


@contextmanager
def greedy_client(url: str) -> Iterator[None]:
    """A client that sends the largest allowed requests without end."""
    stop = threading.Event()

    def work() -> None:
        with connected(url, 60.0) as client:
            rows = client.greeting().max_rows
            while not stop.is_set():
                client.request(obs=state(rows=rows))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def latencies(url: str, count: int = 25) -> np.ndarray:
    """Seconds of requests for one observation."""
    found = []
    with connected(url, 60.0) as client:
        for _ in range(count):
            start = time.perf_counter()
            client.request(obs=state())
            found.append(time.perf_counter() - start)
            time.sleep(0.002)
    return np.array(found)


@pytest.mark.parametrize(
    ("fixed", "per_row"),
    [(0.02, 0.002), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.02, 0.0), (0.002, 0.018)))],
)
def test_a_greedy_client_delays_another_at_most_threefold(fixed: float, per_row: float) -> None:
    with running(Timed(fixed, per_row), ServerConfig(port=0)) as server:
        alone = latencies(server.url)
        with greedy_client(server.url):
            time.sleep(0.3)
            together = latencies(server.url)
    assert np.percentile(together, 90) < 3 * np.percentile(alone, 90)


def test_every_client_gets_its_share_of_a_call() -> None:
    served = Timed(0.002, 0.004)
    with running(served, ServerConfig(port=0, max_batch=8)) as server, greedy_client(server.url):
        time.sleep(0.5)
        with connected(server.url) as client:
            time.sleep(0.2)
            served.rows.clear()
            client.request(obs=state(rows=5))
            assert 2 <= len(served.rows) <= 15  # the request continues in several calls, each of a few rows
            assert max(served.rows) <= 4


def test_a_request_has_a_largest_number_of_rows() -> None:
    with running(Shift(), ServerConfig(port=0)) as server, connected(server.url) as client:
        assert client.greeting().max_rows == 32
        assert client.request(obs=state(rows=32)).chunk.shape == (32, 4, 2)
        with pytest.raises(UserError, match="may have 32 observations, found 33"):
            client.request(obs=state(rows=33))
        with pytest.raises(UserError, match="too large for the endpoint"):
            client.request(obs=state(rows=65_535))


def test_a_token_with_other_characters_is_refused_with_401() -> None:
    with running(Shift(), ServerConfig(port=0, token="secret")) as server:
        address = urlsplit(server.url)
        assert address.hostname
        for value in ("Bearer s\xe9cret", "Bearer \xff\xfe", "secret", "Bearer"):
            connection = http.client.HTTPConnection(address.hostname, address.port or 0, timeout=5)
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
            key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Authorization": value.encode("latin-1")}
            connection.request("GET", "/", headers={**upgrade, **key})
            assert connection.getresponse().status == 401
            connection.close()


SERVED = """
import sys, time
sys.path[:0] = {path!r}
import numpy as np, torch
import robopolicy.deploy.server as server
from robopolicy.cli import serve as command
from robopolicy.cli.main import main
from served_toys import Shift
class Busy(Shift):
    def chunks(self, obs, noise, prefix, streams):
        end = time.monotonic() + ({seconds} if (obs["state"] == 9).any() else 0)
        while time.monotonic() < end:
            torch.randn(400, 400) @ torch.randn(400, 400)
        return np.zeros((len(streams), 4, 2), np.float32)
server._DRAIN_TIMEOUT = 2.0
command._load = lambda args: Busy()
sys.exit(main(["serve", "busy", "--port", "0"]))
"""


@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.slow)], ids=["short", "hung"])
def test_a_signal_while_computing_ends_the_server_cleanly(seconds: float) -> None:
    source = SERVED.format(path=[path for path in sys.path if path], seconds=seconds)
    child = subprocess.Popen([sys.executable, "-c", source], stdout=-1, stderr=-1, text=True)
    assert child.stdout
    url = child.stdout.readline().split(" at ")[1].split(": ")[0]
    with connected(url, 60.0) as client:

        def ask() -> None:
            with suppress(UserError, OSError):
                client.request(obs=state(9.0))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(0.3)
        child.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert child.wait(20) == 0
        assert time.monotonic() - start < 8
        asking.join()
    _, errors = child.communicate()
    assert "Traceback" not in errors and "terminate" not in errors
