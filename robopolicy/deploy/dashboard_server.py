"""Server process of a web dashboard, which relays messages between a program and browsers.

    python -m robopolicy.deploy.dashboard_server HOST PORT DESCRIPTOR PAGE WORD...      (started by
    `robopolicy.deploy.dashboard`)

`/` is the page, `/live` a websocket that sends metrics (text, JSON) and images (binary). Clients may send the commands
of the command line, such as an emergency stop, and nothing else. A token, which is required beyond loopback, is the
first message of a websocket; the page itself contains nothing about the run and needs none. Other web pages of the same
browser are refused by their headers Host and Origin.
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
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from robopolicy.deploy.dashboard import NO_CLIENTS, ENCODED, MAX_PACKET_BYTES, PIXELS, CLIENT_CONNECTED
from robopolicy.deploy.wire import TOKEN, is_loopback
from robopolicy.errors import UserError
from robopolicy.optional import require

SHARED = Path(__file__).parent / "dashboard.js"  # goes into every page, in the place of SHARED
CLIENTS = 16
CLIENT_TIMEOUT = 10.0  # [s] for a token and for a ping
GUESSING = 1.0  # [s] delay after a wrong token
REFUSED = 4401  # close code after a wrong token


class DashboardServer:
    """Web server of one page for one run.

    Args:
        link: Socket to the program.
        host: Listening address.
        token: Required token; "" for none.
        page: HTML file.
        words: Commands that the page may send.
    """

    def __init__(self, link: socket.socket, host: str, token: str, page: Path, commands: Sequence[str]) -> None:
        self._link, self._host, self._token, self._page = link, host, token, page
        self._words = {json.dumps({word: True}): word.encode() for word in commands}
        self._asyncio = require("websockets.asyncio.server", "remote")
        self._http, self._headers = (
            require("websockets.http11", "remote"),
            require("websockets.datastructures", "remote"),
        )
        self._closed = require("websockets.exceptions", "remote").ConnectionClosed
        self._clients: set[Any] = set()  # with a valid token
        self._open = 0  # websockets with and without a valid token
        link.setblocking(False)

    async def run(self, port: int) -> None:
        """Serve until the program ends.

        Raises:
            UserError: The port cannot be opened.
        """
        silent = logging.getLogger("robopolicy.viewer")
        silent.disabled = True  # no traceback for an aborted handshake
        options: dict[str, Any] = {
            "logger": silent,
            "process_request": self._answer,
            "compression": None,
            "max_size": 1024,
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
                message = await asyncio.to_thread(_picture, packet) if known else packet.decode()
                self._asyncio.broadcast(self._clients, message)

    def _answer(self, connection: Any, request: Any) -> Any:
        """The page, a refusal, or None where a websocket may be opened."""
        hosts = request.headers.get_all("Host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._token and not is_loopback(urlsplit(f"//{host}").hostname or ""):
            return connection.respond(403, "Use the name of this machine, as in http://127.0.0.1.\n")
        path = urlsplit(request.path).path
        if path == "/live":
            origins = request.headers.get_all("Origin")
            if any(urlsplit(origin).netloc != host for origin in origins):
                return connection.respond(403, "Access from another page is refused.\n")
            return None if self._open < CLIENTS else connection.respond(503, "Too many clients.\n")
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
        self._open += 1
        try:
            if await self._admitted(connection):
                self._clients.add(connection)
                if len(self._clients) == 1:
                    self._post(CLIENT_CONNECTED)
                async for message in connection:
                    if message not in self._words:
                        await connection.close(1003, "not understood")
                    else:
                        self._post(self._words[message])
        except self._closed:
            pass
        finally:
            self._open -= 1
            if connection in self._clients:
                self._clients.remove(connection)
                if not self._clients:
                    self._post(NO_CLIENTS)

    async def _admitted(self, connection: Any) -> bool:
        if not self._token:
            return True
        shown = ""
        with contextlib.suppress(TimeoutError, ValueError, TypeError, KeyError, RecursionError):
            shown = json.loads(await asyncio.wait_for(connection.recv(), CLIENT_TIMEOUT))["token"]
        if isinstance(shown, str) and hmac.compare_digest(shown.encode(), self._token.encode()):
            return True
        await asyncio.sleep(GUESSING)
        await connection.close(REFUSED, "the token is wrong")
        return False

    def _post(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # `_relay` notices the end of the program
            self._link.send(word)


def _picture(packet: bytes) -> bytes:
    """Browser message of an image: camera name, a zero byte, and the image file."""
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


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; 0 after the end of the run, 2 for an error."""
    host, port, descriptor, page, *words = sys.argv[1:] if argv is None else argv
    if hasattr(os, "sched_setscheduler"):  # a real-time priority is inherited from the control loop
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(10)  # lower priority than the program
    try:
        token = os.environ.get(TOKEN, "")  # required beyond loopback, see `parse_address`
        with socket.socket(fileno=int(descriptor)) as link:
            asyncio.run(DashboardServer(link, host, token, Path(page), words).run(int(port)))
    except UserError as error:
        _print_line(f"error {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
