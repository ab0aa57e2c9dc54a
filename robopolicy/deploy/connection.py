"""A connection to a chunk server, under every client: it opens when needed and does not outlive a failure."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from urllib.parse import SplitResult, urlsplit

from robopolicy.deploy.wire import LARGEST, TOKEN, Greeting, Reply, Request, WireError, is_loopback
from robopolicy.errors import UserError, unknown_name
from robopolicy.extras import need

SCHEMES = ("ws", "wss")


class Connection:
    """The websocket to one address. What may pass, an `OSError`, is for the caller to try again."""

    def __init__(self, url: str, timeout: float, check: Callable[[Greeting], None] = lambda _: None) -> None:
        """Check the address; nothing is sent yet.

        Args:
            url: `ws://HOST:PORT`, or `wss://...`, whose certificate has to be one that this machine trusts (the
                variable SSL_CERT_FILE names a file with others).
            timeout: Seconds to wait for an answer; 0 waits for ever.
            check: Called with every greeting; raises where the server is not the one that was expected.

        Raises:
            UserError: The address is none.
        """
        self._address = _parse(url)
        self.url, self._timeout, self._check = url, timeout or None, check
        self._line: _WebSocket | None = None
        self._number = 0

    def open(self) -> Greeting:
        """Connect and return the greeting.

        Raises:
            UserError: The server refuses, is none, or fails the check.
            OSError: It cannot be reached or is late.
        """
        self.close()
        self._line = _WebSocket(self._address, _headers(self._address), self._timeout)
        try:
            greeting = Greeting.unpack(self._line.receive())
            self._check(greeting)
        except BaseException as error:
            self.close()
            if isinstance(error, WireError):
                raise UserError(f"The endpoint {self.url} is no policy server: {error}.") from error
            raise
        return greeting

    def ask(self, **request: Any) -> Reply:
        """Send a request of these fields, whose number is given here, and wait for its reply.

        Raises:
            UserError: As `open`; the answer is an error, or no reply to this request.
            OSError: As `open`, or the connection is lost.
        """
        if self._line is None:
            self.open()
        assert self._line is not None
        self._number += 1
        try:
            self._line.send(Request(self._number, **request).pack())
            reply = Reply.unpack(self._line.receive())
            if reply.number != self._number and not (reply.error and not reply.number):
                raise WireError(f"expected the reply to request {self._number}, found one to {reply.number}")
        except BaseException as error:
            self.close()
            if isinstance(error, WireError):
                raise UserError(f"The endpoint {self.url} returned no message of the wire format: {error}.") from error
            raise
        if reply.error:
            raise UserError(f"The endpoint {self.url} gave no chunk: {reply.error.splitlines()[0]}")
        return reply

    def close(self) -> None:
        """Close the connection, if there is one; the next question opens another."""
        line, self._line = self._line, None
        if line is not None:
            line.close()


class _WebSocket:
    def __init__(self, address: SplitResult, headers: dict[str, str], timeout: float | None) -> None:
        client = need("websockets.sync.client", "remote")
        self._errors = need("websockets.exceptions", "remote")
        self._timeout = timeout
        self._connection = ExitStack()  # newer versions connect in a context manager alone
        try:
            self._socket = self._connection.enter_context(
                client.connect(
                    address.geturl(),
                    additional_headers=headers,
                    open_timeout=timeout,
                    ping_timeout=timeout,  # a server that answers no ping while it computes is given as long
                    close_timeout=1,
                    max_size=LARGEST,
                    compression=None,
                    proxy=None,
                )
            )
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"The certificate of {address.geturl()} is not trusted ({error.verify_message}); if it is your own, "
                "let SSL_CERT_FILE name it."
            ) from error
        except self._errors.InvalidStatus as error:
            raise _refused(address, error.response.status_code) from error
        except (self._errors.InvalidHandshake, EOFError) as error:
            raise UserError(
                f"The endpoint {address.geturl()} is no policy server: expected a websocket, found something else "
                f"({reason_of(error)})."
            ) from error

    def send(self, message: bytes) -> None:
        try:
            self._socket.send(message)
        except self._errors.ConnectionClosed as error:
            raise _lost(error) from error

    def receive(self) -> bytes | str:
        try:
            return self._socket.recv(timeout=self._timeout)
        except TimeoutError:
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None
        except self._errors.ConnectionClosed as error:
            raise _lost(error) from error

    def close(self) -> None:
        self._connection.close()


def reason_of(error: BaseException) -> str:
    """What went wrong, in one line without its full stop."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _parse(url: str) -> SplitResult:
    try:
        address = urlsplit(url)
        host, _ = address.hostname, address.port
    except ValueError as error:
        raise UserError(f"'{url}' is no address ({error}); pass e.g. ws://127.0.0.1:8765.") from error
    if not host:
        raise UserError(f"'{url}' is no address; pass e.g. ws://127.0.0.1:8765.")
    if address.scheme not in SCHEMES:
        raise unknown_name("scheme", address.scheme, SCHEMES, f"in {url}")
    if address.username or address.password:
        raise UserError(f"An address holds no password, since it is stored; put the token into {TOKEN}.")
    return address


def _headers(address: SplitResult) -> dict[str, str]:
    token = os.environ.get(TOKEN, "")
    if not token and not is_loopback(address.hostname or ""):
        raise UserError(
            f"{address.hostname} is another machine, so the endpoint asks for a token; put it into {TOKEN}."
        )
    return {"Authorization": f"Bearer {token}"} if token else {}


def _refused(address: SplitResult, status: int) -> Exception:
    url = address.geturl()
    if status >= 500:  # busy, or on its way up or down
        return ConnectionError(f"status {status}")
    if status in (401, 403):
        return UserError(f"The endpoint {url} refuses the token (status {status}); put the right one into {TOKEN}.")
    return UserError(f"The endpoint {url} answers with status {status}, expected a policy server; check the address.")


def _lost(closed: Any) -> Exception:
    if closed.rcvd is not None and closed.rcvd.code == 1009:
        return UserError(f"The message is larger than the endpoint takes ({closed.rcvd.reason or 'no reason given'}).")
    return ConnectionError("the connection was closed")
