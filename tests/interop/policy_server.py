"""A tiny policy server for tests, which can be slow, change while clients are connected, or send invalid replies."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np

from robopolicy.deploy.wire import Greeting, Reply, Request
from robopolicy.policies.base import PolicySpec

SPEC = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, action_horizon=2)


def shifted(request: Request) -> np.ndarray:
    """Noise plus the position, so that the chunk depends on every input."""
    shift = request.obs["state"][:, -1:, :2]
    return shift + (np.zeros((len(shift), 4, 2), np.float32) if request.noise is None else request.noise)


@dataclass
class Served:
    """Settings and requests of a server; tests change the settings while it runs."""

    greeting: Greeting = field(default_factory=lambda: Greeting(SPEC, "shifted", noise=True))
    chunk: Callable[[Request], np.ndarray] = shifted
    token: str = ""
    raw: Callable[[bytes | str], bytes | str] | None = None  # replaces the valid reply
    url: str = ""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    def reply(self, data: bytes | str) -> bytes | str:
        """Answer one message."""
        if self.raw is not None:
            return self.raw(data)
        request = Request.unpack(data)
        self.requests.append(request)
        try:
            return Reply(request.number, self.chunk(request)).pack()
        except ValueError as error:
            return Reply(request.number, error=str(error)).pack()

    def allows(self, header: str | None) -> bool:
        """Whether the token matches."""
        return not self.token or header == f"Bearer {self.token}"


@contextmanager
def serving(**settings: Any) -> Iterator[Served]:
    """A server on a free loopback port."""
    from websockets.sync.server import ServerConnection, serve

    served = Served(**settings)

    def check(connection: ServerConnection, request: Any) -> Any:
        if not served.allows(request.headers.get("Authorization")):
            return connection.respond(HTTPStatus.UNAUTHORIZED, "no")
        return None

    def handle(connection: ServerConnection) -> None:
        served.connections += 1
        connection.send(served.greeting.pack())
        for message in connection:
            connection.send(served.reply(message))

    server = serve(handle, "127.0.0.1", 0, process_request=check, max_size=None)
    served.url = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join(5)
