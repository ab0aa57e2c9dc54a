"""Websocket connections to policy servers: addresses, tokens and errors."""

from __future__ import annotations

import ssl
from contextlib import ExitStack
from typing import Any
from urllib.parse import SplitResult, urlsplit

from robopolicy.deploy.wire import MAX_MESSAGE_BYTES
from robopolicy.errors import UserError, unknown_name
from robopolicy.optional import require
from robopolicy.tokens import ENCRYPTED, client_token, is_loopback, token_hint

SCHEMES = ("ws", "wss")


class WebSocket:
    """Websocket connection to a policy server; a lost one raises `OSError`."""

    def __init__(self, address: SplitResult, timeout: float | None, scheme: str = "Bearer") -> None:
        """Connect and send the token of the host.

        Args:
            address: Address of `parse_address`.
            timeout: Timeout of the handshake, of pings and of every message [s]; None for none.
            scheme: Word before the token in the header `Authorization`.

        Raises:
            UserError: A token is missing, or the server rejects it or is no websocket server.
            OSError: The server cannot be reached or is busy.
        """
        client = require("websockets.sync.client", "remote")
        self._errors = require("websockets.exceptions", "remote")
        self._timeout = timeout
        self._connection = ExitStack()  # newer versions of websockets connect only in a context manager
        try:
            options: dict[str, Any] = {"max_size": MAX_MESSAGE_BYTES, "compression": None, "proxy": None}
            options |= {"open_timeout": timeout, "close_timeout": 1}
            options["ping_timeout"] = timeout  # a server may not respond to pings during inference
            connecting = client.connect(address.geturl(), additional_headers=_headers(address, scheme), **options)
            self._socket = self._connection.enter_context(connecting)
        except ssl.SSLCertVerificationError as error:
            text = f"The certificate of {address.geturl()} is not trusted ({error.verify_message})"
            raise UserError(f"{text}; for a private certificate, set SSL_CERT_FILE to its file.") from error
        except self._errors.InvalidStatus as error:
            raise _refused(address, error.response.status_code) from error
        except (self._errors.InvalidHandshake, EOFError) as error:
            text = f"The endpoint {address.geturl()} is not a policy server: no websocket ({reason_of(error)})."
            raise UserError(text) from error

    def send(self, message: bytes) -> None:
        """Send a binary message."""
        try:
            self._socket.send(message)
        except self._errors.ConnectionClosed as error:
            raise _lost(error) from error

    def receive(self) -> bytes | str:
        """Wait for a message; a TimeoutError is raised after the timeout."""
        try:
            return self._socket.recv(timeout=self._timeout)
        except TimeoutError:
            raise TimeoutError(f"no reply within {self._timeout:g} s") from None
        except self._errors.ConnectionClosed as error:
            raise _lost(error) from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def reason_of(error: BaseException) -> str:
    """First line of an error, without a full stop."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def parse_address(url: str) -> SplitResult:
    """Split the address of a server; raises a UserError for anything but `ws://HOST:PORT` and `wss://HOST:PORT`."""
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        raise UserError(f"'{url}' is not an address ({error}); pass e.g. ws://127.0.0.1:8765.") from error
    if not host:
        raise UserError(f"'{url}' is not an address; pass e.g. ws://127.0.0.1:8765.")
    if address.scheme not in SCHEMES:
        raise unknown_name("scheme", address.scheme, SCHEMES, f"in {url}")
    if address.fragment:
        raise UserError(f"The address '{url}' ends with a fragment; leave out '#{address.fragment}'.")
    if address.username or address.password:
        raise UserError(f"An address must not contain a password, since it is stored; {token_hint(address)}.")
    return address


def _headers(address: SplitResult, scheme: str) -> dict[str, str]:
    token = client_token(address)
    if not token and not is_loopback(address.hostname or ""):
        encrypted = "" if address.scheme in ENCRYPTED else f"; use wss:// and {token_hint(address)}, or an SSH tunnel"
        text = f"{address.hostname} is another machine, so the endpoint needs a token"
        raise UserError(f"{text}{encrypted or f'; {token_hint(address)}'}.")
    return {"Authorization": f"{scheme} {token}"} if token else {}


def _refused(address: SplitResult, status: int) -> Exception:
    url = address.geturl()
    if status >= 500:  # busy, starting or stopping
        return ConnectionError(f"status {status}")
    if status in (401, 403):
        return UserError(f"The endpoint {url} rejects the token (status {status}); {token_hint(address)}.")
    return UserError(f"The endpoint {url} returned status {status}, expected a policy server; check the address.")


def _lost(closed: Any) -> Exception:
    if closed.rcvd is not None and closed.rcvd.code == 1009:
        return UserError(f"The message is too large for the endpoint ({closed.rcvd.reason or 'no reason given'}).")
    return ConnectionError("the connection was closed")
