"""Isolated networks for the transport tests: loopback addresses, free ports and unused domains."""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from robopolicy_robots.transports.base import Transport, open_transport

_domains = itertools.count(os.getpid())


def free_domain() -> int:
    """Return a ROS_DOMAIN_ID that no other test uses, in this process or in another pytest worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    share = 130 // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return 100 + worker * share + next(_domains) % share  # the standard's port range ends at domain 232


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait for `condition` and return its first true result; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
    return result


class Network:
    """A network on which transports of one kind see each other; `open` creates them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings: dict[str, Any] = {"domain": free_domain()}
        self.helpers: list[Any] = []
        self.opened: list[Transport] = []
        if name == "zenoh":
            router = f"tcp/127.0.0.1:{free_port()}"
            self.helpers.append(open_transport("zenoh", listen=router, **self.settings))
            self.settings["router"] = router
        elif name == "rosbridge":
            from rosbridge_hub import Hub

            self.hub = Hub()
            self.settings = {"url": self.hub.url}

    def open(self) -> Transport:
        """Open another transport; the network closes it."""
        self.opened.append(open_transport(self.name, **self.settings))
        return self.opened[-1]

    def close(self) -> None:
        """Close everything."""
        for transport in (*self.opened, *self.helpers):
            transport.close()
        if self.name == "rosbridge":
            self.hub.stop()


NEEDS = {"dds": ("rosbags", "cyclonedds"), "zenoh": ("rosbags", "zenoh"), "rosbridge": ("rosbags", "websockets")}


@pytest.fixture
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Yield the network of the transport named by the test parameter."""
    for package in NEEDS.get(request.param, ()):
        pytest.importorskip(package, reason="needs robopolicy[ros]")
    monkeypatch.delenv("CYCLONEDDS_URI", raising=False)  # the transport restricts itself to this machine
    monkeypatch.setattr("robopolicy_robots.transports.rosbridge.PEER_POLL_PERIOD", 0.05)
    made = Network(request.param)
    yield made
    made.close()
