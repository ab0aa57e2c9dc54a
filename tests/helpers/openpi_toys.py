"""A server in the protocol of openpi that shares no code with ours, as the text of the protocol describes it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np


def pack(value: Any) -> bytes:
    def as_map(found: Any) -> Any:
        return {b"__ndarray__": True, b"data": found.tobytes(), b"dtype": found.dtype.str, b"shape": found.shape}

    return msgpack.packb(value, default=as_map)


def unpack(data: bytes) -> Any:
    def from_map(found: Any) -> Any:
        if b"__ndarray__" not in found:
            return found
        return np.frombuffer(found[b"data"], found[b"dtype"]).reshape(found[b"shape"])

    return msgpack.unpackb(data, object_hook=from_map)


def tiled(obs: dict[str, Any]) -> dict[str, Any]:
    """A chunk of ten actions, each the first two numbers of the state."""
    return {"actions": np.tile(np.asarray(obs["observation/state"], np.float32)[:2], (10, 1))}


@contextmanager
def openpi_server(
    infer: Callable[[dict[str, Any]], Any] = tiled, metadata: Any = None, error: Any = None
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address of a server on a free port, and the requests that it has received; `error` replaces every reply."""
    from websockets.sync.server import serve

    requests: list[dict[str, Any]] = []

    def handle(connection: Any) -> None:
        connection.send(pack({} if metadata is None else metadata))
        for data in connection:
            requests.append(unpack(data))
            connection.send(pack(infer(requests[-1])) if error is None else error)

    server = serve(handle, "127.0.0.1", 0, compression=None, max_size=None)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", requests
    finally:
        server.shutdown()
        thread.join(5)
