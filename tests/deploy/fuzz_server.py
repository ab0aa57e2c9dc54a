"""Fuzzer of a chunk server with damaged messages and frames; `python tests/deploy/fuzz_server.py 100000` runs long."""

import resource
import socket
import sys
import time
from typing import Any

import numpy as np
from served_toys import Shift, connected, state

from robopolicy.deploy.server import running
from robopolicy.deploy.wire import Reply, Request

NOISE = np.zeros((1, 4, 2), np.float32)
GOOD = Request(1, state(), NOISE, streams=np.array([[3, 0]]), deadline=1.0).pack()


def damaged(rng: np.random.Generator) -> bytes:
    """A request with some bytes changed, cut off or added."""
    data = bytearray(GOOD[: rng.integers(0, len(GOOD) + 1)] if rng.random() < 0.3 else GOOD)
    for place in rng.integers(0, max(len(data), 1), rng.integers(1, 5)):
        data[place : place + 1] = rng.bytes(int(rng.integers(0, 3)))
    return bytes(data)


def fuzz(url: str, frames: int, seed: int = 0) -> dict[str, int]:
    """Send damaged messages and damaged frames; count the replies by kind."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    rng, found = np.random.default_rng(seed), {"errors": 0, "chunks": 0, "closed": 0}
    address = (url.split("//")[1].split(":")[0], int(url.rsplit(":", 1)[1]))
    line: Any = None
    for _ in range(frames):
        if line is None:
            line = connect(url, compression=None, proxy=None)
            client = line.__enter__()
            client.recv()  # the greeting
        try:
            if rng.random() < 0.005:  # raw bytes that are not a frame
                client.socket.sendall(rng.bytes(int(rng.integers(1, 200))))
            client.send(damaged(rng) if rng.random() < 0.95 else "text")
            reply = Reply.unpack(client.recv(timeout=0.5))
            assert "\n" not in reply.error
            found["errors" if reply.error else "chunks"] += 1
        except (ConnectionClosed, TimeoutError):  # refused as a frame, or the server waits for the rest of one
            found["closed"] += 1
            line.__exit__(None, None, None)
            line = None
            if rng.random() < 0.5:  # not a websocket connection
                with socket.create_connection(address) as raw:
                    raw.sendall(rng.bytes(int(rng.integers(1, 500))) + b"\r\n\r\n")
    if line is not None:
        line.__exit__(None, None, None)
    return found


def main(frames: int) -> None:
    """Fuzz a server in this process while another client sends requests; print the counts."""
    with running(Shift()) as server, connected(server.url) as bystander:
        found, start, before = {"errors": 0, "chunks": 0, "closed": 0}, time.monotonic(), 0
        for part in range(10):
            for key, count in fuzz(server.url, frames // 10, seed=part).items():
                found[key] += count
            assert bystander.request(obs=state(2.0), noise=NOISE).chunk.mean() == 2.0
            before = before or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        seconds, counts = time.monotonic() - start, ", ".join(f"{count} {key}" for key, count in found.items())
        sys.stdout.write(f"{frames} frames in {seconds:.0f} s: {counts}, {grown} KiB more than after the first tenth\n")
        sys.stdout.write(f"{server.statistics.line()}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
