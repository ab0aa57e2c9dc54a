"""Web dashboard of a program: sends metrics and images, and receives a fixed set of commands.

A separate process serves the page (`robopolicy.deploy.dashboard_server`), since a web server in the process of the
program would block its interpreter. Packets that do not fit into the socket are dropped.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.tokens import SERVER_TOKEN, is_loopback

SERVER = "robopolicy.deploy.dashboard_server"
MAX_PACKET_BYTES = 2**18
MAX_MESSAGE_BYTES = 2**13  # of a message of the server
PIXELS, ENCODED = b"P", b"E"  # first byte of an image packet: raw pixels, or an encoded file
CLIENT_CONNECTED, NO_CLIENTS = (
    b"watched",
    b"alone",
)  # messages of the server: the first client has connected, the last has left


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `PORT`; raises `UserError` if invalid, or without a required token."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or not int(port) < 2**16:
        raise UserError(f"The dashboard needs an address PORT or HOST:PORT, such as 127.0.0.1:8780; got '{text}'.")
    if not is_loopback(host) and not os.environ.get(SERVER_TOKEN):
        text = "can be reached from other machines, so the dashboard needs a token"
        raise UserError(f"{host} {text}; set {SERVER_TOKEN}, or listen on 127.0.0.1.")
    return host, int(port)


def pixels_packet(camera: str, pixels: NDArray[np.uint8]) -> bytes:
    """Packet with an image `(h, w, 1 or 3)` uint8 of a camera."""
    return PIXELS + camera.encode() + b"\0" + struct.pack("<HHB", *pixels.shape) + pixels.tobytes()


class Dashboard:
    """Server process of one web page; `close` ends it.

    Args:
        address: Listening address, `HOST:PORT` or `PORT`.
        file: HTML file of the page.
        commands: Commands that the page may send, as `{"COMMAND": true}`.
        server: Module of the server process.

    Raises:
        UserError: The address cannot be opened.
    """

    def __init__(self, address: str, file: Path, commands: Sequence[str], server: str = SERVER) -> None:
        host, port = parse_address(address)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # with packets and an end of file
        self.link.setblocking(False)
        self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
        command = [sys.executable, "-m", server, host, str(port), str(theirs.fileno())]
        options: dict[str, Any] = {"pass_fds": [theirs.fileno()], "stdout": subprocess.PIPE, "text": True}
        # A new session, so that Ctrl-C ends the program first.
        self.process = subprocess.Popen([*command, str(file), *commands], start_new_session=True, **options)
        theirs.close()
        assert self.process.stdout is not None
        self.url, _, error = self.process.stdout.readline().strip().partition(" ")
        if not self.url.startswith("http"):
            self.close()
            raise UserError(error or "The dashboard did not start; see its message above.")

    def send(self, packet: bytes) -> bool:
        """Send metrics (JSON) or an image; return False if the socket is full or closed or the packet is too long."""
        try:
            self.link.send(packet)
        except OSError:
            return False
        return True

    def poll(self) -> bytes | None:
        """Return the next message of the server; None without one, and empty bytes after its end."""
        try:
            return self.link.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        """End the server; safe to call twice."""
        self.link.close()  # ends the server
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
