"""Access tokens for servers, each bound to the host that it is sent to.

    export ROBOPOLICY_TOKEN_GPU1_LAB=...           the host gpu1.lab: "." becomes "_", "-" becomes "__"
    export ROBOPOLICY_TOKEN_LOCALHOST=...          every loopback address

or lines `gpu1.lab: TOKEN` in `~/.config/robopolicy/tokens.yaml`, which only its owner may read. A token is sent to its
host alone, over TLS or to this machine. `ROBOPOLICY_TOKEN` is what a server requires; clients do not read it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult

from robopolicy.errors import UserError
from robopolicy.files import parse_yaml

SERVER_TOKEN = "ROBOPOLICY_TOKEN"  # environment variable of the token that a server requires
ENCRYPTED = ("wss", "https")
LOCALHOST = "localhost"


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == LOCALHOST


def client_token(address: SplitResult) -> str:
    """Return the token for a server; "" without one.

    Raises:
        UserError: The token would be sent unencrypted to another machine, or the file of tokens is invalid.
    """
    host = _host(address)
    token = os.environ.get(token_variable(host) or "", "") or _from_file(host)
    if not token:
        return ""
    if not token.isascii() or any(letter.isspace() for letter in token):
        raise UserError(f"The token for {host} must consist of ASCII letters, digits and punctuation, without spaces.")
    if address.scheme not in ENCRYPTED and host != LOCALHOST:
        encrypted = {"ws": "wss", "http": "https"}.get(address.scheme, "TLS")
        raise UserError(f"The token for {host} would be sent unencrypted; use {encrypted}:// or an SSH tunnel.")
    return token


def token_hint(address: SplitResult) -> str:
    """Return how to set the token for a server, for messages."""
    host = _host(address)
    variable = token_variable(host)
    return f"set {variable}" if variable else f"add '{host}: TOKEN' to {_file()}"


def token_variable(host: str) -> str | None:
    """Return the environment variable of a host; None for hosts that no variable names, such as IPv6 addresses."""
    if not re.fullmatch(r"[a-z0-9.-]+", host):
        return None
    return f"{SERVER_TOKEN}_{host.replace('-', '__').replace('.', '_').upper()}"


def _host(address: SplitResult) -> str:
    host = (address.hostname or "").lower().rstrip(".")
    return LOCALHOST if is_loopback(host) else host


def _file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "robopolicy" / "tokens.yaml"


def _from_file(host: str) -> str:
    file = _file()
    try:
        mode = file.stat().st_mode
        content = parse_yaml(file.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise UserError(f"{file} can be read by other users; run: chmod 600 {file}")
    if not isinstance(content, Mapping) or not all(isinstance(token, str) for token in content.values()):
        raise UserError(f"{file} must contain lines 'HOST: TOKEN'.")
    return str(content.get(host, ""))
