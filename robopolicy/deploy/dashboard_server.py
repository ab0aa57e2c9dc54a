"""A page in a browser: the process that serves it and passes on what a program hands over.

    python -m robopolicy.deploy.dashboard_server HOST PORT DESCRIPTOR PAGE WORD...      (started by
    `robopolicy.deploy.dashboard`)

`/` is the page, `/live` a websocket on which figures (text, JSON) and pictures (binary) come. Back go the words of the
command line, such as the press of an emergency stop, and nothing else. Where there is a token, as beyond loopback there
has to be, it is the first message of a websocket; the page itself says nothing about the run and needs none. Other web
pages of the same browser are kept out by the names that they have to give (Host and Origin).
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

from robopolicy.deploy.dashboard import ALONE, ENCODED, LARGEST, PIXELS, WATCHED
from robopolicy.deploy.wire import TOKEN, is_loopback
from robopolicy.errors import UserError
from robopolicy.optional import need

SHARED = Path(__file__).parent / "dashboard.js"  # goes into every page, in the place of SHARED
CLIENTS = 16
PATIENCE = 10.0  # [s] for a token, and for an answer to a sign of life
GUESSING = 1.0  # [s] that a wrong token costs
REFUSED = 4401  # code with which a websocket is closed whose token is wrong


class Viewer:
    """One page for one run.

    Args:
        link: The other end of the program's pair of sockets.
        host: Where it listens.
        token: What has to be shown; "" asks for none.
        page: File of the page.
        words: What it may say.
    """

    def __init__(self, link: socket.socket, host: str, token: str, page: Path, words: Sequence[str]) -> None:
        self._link, self._host, self._token, self._page = link, host, token, page
        self._words = {json.dumps({word: True}): word.encode() for word in words}
        self._asyncio = need("websockets.asyncio.server", "remote")
        self._http, self._headers = need("websockets.http11", "remote"), need("websockets.datastructures", "remote")
        self._closed = need("websockets.exceptions", "remote").ConnectionClosed
        self._clients: set[Any] = set()  # that may see
        self._open = 0  # websockets, these and those that have not shown a token yet
        link.setblocking(False)

    async def run(self, port: int) -> None:
        """Serve until the program has gone.

        Raises:
            UserError: It cannot listen there.
        """
        silent = logging.getLogger("robopolicy.viewer")
        silent.disabled = True  # a browser that leaves in the middle of a handshake is no reason for a traceback
        options: dict[str, Any] = {
            "logger": silent,
            "process_request": self._answer,
            "compression": None,
            "max_size": 1024,
            "ping_interval": PATIENCE,
            "ping_timeout": PATIENCE,  # a browser that takes nothing is cut off before much has piled up
            "close_timeout": 1,
        }
        try:
            server = await self._asyncio.serve(self._client, self._host, port, **options)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"Cannot listen on {self._host}:{port} ({reason}); pass another port.") from error
        name = f"[{self._host}]" if ":" in self._host else self._host
        _say(f"http://{name}:{next(iter(server.sockets)).getsockname()[1]}/")
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
            while packet := await loop.sock_recv(self._link, 2 * LARGEST):
                known = packet[:1] in (PIXELS, ENCODED)
                message = await asyncio.to_thread(_picture, packet) if known else packet.decode()
                self._asyncio.broadcast(self._clients, message)

    def _answer(self, connection: Any, request: Any) -> Any:
        """The page, a refusal, or None where a websocket may be opened."""
        hosts = request.headers.get_all("Host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not self._token and not is_loopback(urlsplit(f"//{host}").hostname or ""):
            return connection.respond(403, "Call this machine by its own name, as in http://127.0.0.1.\n")
        path = urlsplit(request.path).path
        if path == "/live":
            origins = request.headers.get_all("Origin")
            if any(urlsplit(origin).netloc != host for origin in origins):
                return connection.respond(403, "Another page may not look in here.\n")
            return None if self._open < CLIENTS else connection.respond(503, "There are too many viewers.\n")
        if path != "/":
            return connection.respond(404, "There is nothing here.\n")
        nonce = secrets.token_urlsafe(16)
        page = self._page.read_text(encoding="utf-8").replace("SHARED", SHARED.read_text(encoding="utf-8"))
        page = page.replace("NONCE", nonce)
        body = page.replace('"TOKEN"', '"needed"' if self._token else '"none"').encode()
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )  # a page that frames this one could make somebody press the button
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
                    self._tell(WATCHED)
                async for message in connection:
                    if message not in self._words:
                        await connection.close(1003, "not understood")
                    else:
                        self._tell(self._words[message])
        except self._closed:
            pass
        finally:
            self._open -= 1
            if connection in self._clients:
                self._clients.remove(connection)
                if not self._clients:
                    self._tell(ALONE)

    async def _admitted(self, connection: Any) -> bool:
        if not self._token:
            return True
        shown = ""
        with contextlib.suppress(TimeoutError, ValueError, TypeError, KeyError, RecursionError):
            shown = json.loads(await asyncio.wait_for(connection.recv(), PATIENCE))["token"]
        if isinstance(shown, str) and hmac.compare_digest(shown.encode(), self._token.encode()):
            return True
        await asyncio.sleep(GUESSING)
        await connection.close(REFUSED, "the token is wrong")
        return False

    def _tell(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # the program has gone, which `_relay` finds out
            self._link.send(word)


def _picture(packet: bytes) -> bytes:
    """What a browser shows: the camera's name, a zero byte, and the file of an image."""
    head, _, data = packet[1:].partition(b"\0")
    if packet[:1] == PIXELS:
        from PIL import Image

        height, width, channels = struct.unpack_from("<HHB", data)
        pixels = np.frombuffer(data, np.uint8, offset=5).reshape(height, width, channels)
        file = BytesIO()
        Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(file, "JPEG", quality=80)
        data = file.getvalue()
    return head + b"\0" + data


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; 0 once the run is over, 2 where it cannot."""
    host, port, descriptor, page, *words = sys.argv[1:] if argv is None else argv
    if hasattr(os, "sched_setscheduler"):  # a control loop with real-time priority hands it on
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.nice(10)  # the program goes first
    try:
        token = os.environ.get(TOKEN, "")  # beyond loopback there is one, see `parse_address`
        with socket.socket(fileno=int(descriptor)) as link:
            asyncio.run(Viewer(link, host, token, Path(page), words).run(int(port)))
    except UserError as error:
        _say(f"error {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
