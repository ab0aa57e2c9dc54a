"""A page in a browser, its program's end: hands over what is worth seeing, and hears which of a few words was said.

The page is served by a process of its own (`robopolicy.deploy.dashboard_server`), at the other end of a pair of
sockets: a web server within the program's process would take the interpreter from it. A packet that does not fit into
the socket at once is left out. Back come words that were agreed on at the start, and nothing else.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from robopolicy.deploy.wire import TOKEN, is_loopback
from robopolicy.errors import UserError

LARGEST = 2**18  # bytes of a packet
PIXELS, ENCODED = b"P", b"E"  # first byte of a packet with a picture: raw, or a file
WATCHED, ALONE = b"watched", b"alone"  # said by the server itself: somebody looks, nobody does


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `PORT`.

    Raises:
        UserError: It is neither, or needs a token that is not there.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or not int(port) < 2**16:
        raise UserError(f"The viewer listens on PORT or HOST:PORT, such as 127.0.0.1:8780; got '{text}'.")
    if not is_loopback(host) and not os.environ.get(TOKEN):
        raise UserError(
            f"{host} can be reached from other machines, so the viewer needs a token; put one into {TOKEN}, or listen "
            "on 127.0.0.1."
        )
    return host, int(port)


def pixels_packet(camera: str, pixels: NDArray[np.uint8]) -> bytes:
    """The picture `(h, w, 1 or 3)` uint8 of a camera as a packet."""
    return PIXELS + camera.encode() + b"\0" + struct.pack("<HHB", *pixels.shape) + pixels.tobytes()


class Page:
    """Starts the server of one page; `close` ends it.

    Args:
        address: Where it listens, `HOST:PORT` or `PORT`.
        file: The page.
        words: What it may say, by a message `{"WORD": true}`.

    Raises:
        UserError: It cannot listen there; one line.
    """

    def __init__(self, address: str, file: Path, words: Sequence[str]) -> None:
        host, port = parse_address(address)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # packets, and an end of file
        self.link.setblocking(False)
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LARGEST)
        command = [sys.executable, "-m", "robopolicy.deploy.dashboard_server", host, str(port), str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, str(file), *words],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # in a session of its own, so that Ctrl-C ends the program and not the page of its end
        theirs.close()
        assert self.process.stdout is not None
        self.url, _, error = self.process.stdout.readline().strip().partition(" ")
        if not self.url.startswith("http"):
            self.close()
            raise UserError(error or "The viewer did not start; see its message above.")

    def send(self, packet: bytes) -> bool:
        """Hand over figures (JSON) or a picture; False where it does not fit, is too long, or nobody is there."""
        try:
            self.link.send(packet)
        except OSError:
            return False
        return True

    def hear(self) -> bytes | None:
        """What was said next; None where nothing was, and no bytes once the server has gone."""
        try:
            return self.link.recv(64)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """End the server; may be called twice."""
        self.link.close()  # which ends it
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
