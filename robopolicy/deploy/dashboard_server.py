"""Server process of a web dashboard, which relays messages between a program and browsers.

    python -m robopolicy.deploy.dashboard_server HOST PORT DESCRIPTOR PAGE COMMAND...

`/` is the page, `/live` a websocket that sends metrics (text, JSON) and images (binary). Clients may send only the
commands of the command line, such as an emergency stop. The token, required beyond loopback, is the first message of a
websocket; the page contains no data of the run and needs no token. The headers Host and Origin are checked to reject
other web pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np

from robopolicy.deploy.dashboard import CLIENT_CONNECTED, ENCODED, MAX_PACKET_BYTES, NO_CLIENTS, PIXELS
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.tokens import SERVER_TOKEN, is_loopback

SHARED = Path(__file__).parent / "dashboard.js"  # replaces SHARED in every page
CLIENT_TIMEOUT = 10.0  # [s] timeout of the token and of a ping
WRONG_TOKEN_DELAY = 1.0  # [s]
WRONG_TOKEN = 4401  # close code
MAX_PENDING = 64  # websockets without a token; another one closes the oldest


class DashboardServer:
    """Web server of a dashboard.

    Args:
        link: Socket of the program.
        host: Listening address.
        token: Required token; "" for none.
        page: HTML file.
        commands: Commands that the page may send.
    """

    max_clients: ClassVar[int] = 16
    max_message: ClassVar[int] = 1024  # bytes of a message of a client
    niceness: ClassVar[int] = 10  # lower priority than the program

    def __init__(self, link: socket.socket, host: str, token: str, page: Path, commands: Sequence[str]) -> None:
        self._link, self._host, self._token, self._page = link, host, token, page
        self._commands = {json.dumps({name: True}): name.encode() for name in commands}
        self._asyncio = require("websockets.asyncio.server", "remote")
        self._http = require("websockets.http11", "remote")
        self._headers = require("websockets.datastructures", "remote")
        self._closed = require("websockets.exceptions", "remote").ConnectionClosed
        self._clients: set[Any] = set()  # websockets with a valid token
        self._pending: list[Any] = []  # websockets whose token has not arrived, oldest first
        link.setblocking(False)

    async def run(self, port: int) -> None:
        """Serve until the program ends; raises `UserError` if the port cannot be opened."""
        silent = logging.getLogger("robopolicy.viewer")
        silent.disabled = True  # no tracebacks of aborted handshakes
        options: dict[str, Any] = {
            "logger": silent,
            "process_request": self._respond,
            "compression": None,
            "max_size": self.max_message,
            "ping_interval": CLIENT_TIMEOUT,
            "ping_timeout": CLIENT_TIMEOUT,  # disconnects a browser that does not read
            "close_timeout": 1,
        }
        try:
            server = await self._asyncio.serve(self._client, self._host, port, **options)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"Cannot listen on {self._host}:{port} ({reason}); pass another port.") from error
        name = f"[{self._host}]" if ":" in self._host else self._host
        _print_line(f"http://{name}:{next(iter(server.sockets)).getsockname()[1]}/")
        try:
            await self._relay()
        finally:
            await asyncio.gather(*(client.close(1001, "the run is over") for client in self._clients))
            server.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), 1.0)

    async def _relay(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while packet := await loop.sock_recv(self._link, 2 * MAX_PACKET_BYTES):
                known = packet[:1] in (PIXELS, ENCODED)
                message = await asyncio.to_thread(_image_message, packet) if known else packet.decode()
                self._asyncio.broadcast(self._clients, message)

    def _respond(self, connection: Any, request: Any) -> Any:
        """Return the page or an error response, or None to open a websocket."""
        try:
            return self._answer(connection, request)
        except ValueError:  # of `urlsplit`, e.g. for the host "[::1"
            return connection.respond(400, "The path or a header of the request is malformed.\n")

    def _answer(self, connection: Any, request: Any) -> Any:
        hosts = request.headers.get_all("Host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._token and not is_loopback(urlsplit(f"//{host}").hostname or ""):
            return connection.respond(403, "Use a loopback address, such as http://127.0.0.1.\n")
        path = urlsplit(request.path).path
        if path == "/live":
            origins = request.headers.get_all("Origin")
            if any(urlsplit(origin).netloc != host for origin in origins):
                return connection.respond(403, "Access from another page is refused.\n")
            full = len(self._clients) >= self.max_clients
            return connection.respond(503, "Too many clients.\n") if full else None
        if path != "/":
            return connection.respond(404, "Not found.\n")
        nonce = secrets.token_urlsafe(16)
        page = self._page.read_text(encoding="utf-8").replace("SHARED", SHARED.read_text(encoding="utf-8"))
        page = page.replace("NONCE", nonce)
        body = page.replace('"TOKEN"', '"needed"' if self._token else '"none"').encode()
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )  # against clickjacking
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Connection": "close",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return self._http.Response(200, "OK", self._headers.Headers(headers), body)

    async def _client(self, connection: Any) -> None:
        try:
            if await self._admit(connection):
                self._clients.add(connection)
                if len(self._clients) == 1:
                    self._post(CLIENT_CONNECTED)
                async for message in connection:
                    if (received := self.receive(message)) is None:
                        await connection.close(1003, "unknown command")
                    else:
                        self._post(received)
        except self._closed:
            pass
        finally:
            if connection in self._clients:
                self._clients.remove(connection)
                if not self._clients:
                    self._post(NO_CLIENTS)

    def receive(self, message: str | bytes) -> bytes | None:
        """Convert a message of a client for the program; None disconnects the client."""
        return self._commands.get(message) if isinstance(message, str) else None

    async def _admit(self, connection: Any) -> bool:
        """Wait for the token, and reject the connection without it or if there are enough clients."""
        self._pending.append(connection)
        if len(self._pending) > MAX_PENDING:
            self._pending.pop(0).transport.abort()
        try:
            valid = await self._authenticate(connection)
        finally:
            if connection in self._pending:
                self._pending.remove(connection)
        if valid and len(self._clients) >= self.max_clients:
            await connection.close(1013, "too many clients")
            return False
        return valid

    async def _authenticate(self, connection: Any) -> bool:
        if not self._token:
            return True
        token = ""
        with contextlib.suppress(TimeoutError, ValueError, TypeError, KeyError, RecursionError):
            token = json.loads(await asyncio.wait_for(connection.recv(), CLIENT_TIMEOUT))["token"]
        if isinstance(token, str) and hmac.compare_digest(token.encode(), self._token.encode()):
            return True
        await asyncio.sleep(WRONG_TOKEN_DELAY)
        await connection.close(WRONG_TOKEN, "the token is wrong")
        return False

    def _post(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # `_relay` detects the end of the program
            self._link.send(message)


def _image_message(packet: bytes) -> bytes:
    """Convert an image packet to a message for browsers: camera name, a zero byte, and the image file."""
    head, _, data = packet[1:].partition(b"\0")
    if packet[:1] == PIXELS:
        from PIL import Image

        height, width, channels = struct.unpack_from("<HHB", data)
        pixels = np.frombuffer(data, np.uint8, offset=5).reshape(height, width, channels)
        file = BytesIO()
        Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(file, "JPEG", quality=80)
        data = file.getvalue()
    return head + b"\0" + data


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None, server: type[DashboardServer] = DashboardServer) -> int:
    """Run a server; exit code 0 after the end of the program, 2 for an error."""
    host, port, descriptor, page, *commands = sys.argv[1:] if argv is None else argv
    if hasattr(os, "sched_setscheduler"):  # reset the real-time priority inherited from the control loop
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(server.niceness)
    try:
        token = os.environ.get(SERVER_TOKEN, "")  # checked by `parse_address`
        with socket.socket(fileno=int(descriptor)) as link:
            asyncio.run(server(link, host, token, Path(page), commands).run(int(port)))
    except UserError as error:
        _print_line(f"error {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
