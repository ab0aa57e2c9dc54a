"""Tokens of clients: bound to a host, sent over TLS or to the loopback address only, never because of a checkpoint."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from served_toys import Shift

from robopolicy.deploy.client import ServerChunkPolicy
from robopolicy.deploy.server import ServerConfig, running
from robopolicy.errors import UserError
from robopolicy.interop.remote import RemoteConfig, RemotePolicy
from robopolicy.policies.base import PolicySpec
from robopolicy.tokens import client_token, token_hint, token_variable


def token(url: str) -> str:
    return client_token(urlsplit(url))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of tokens."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "robopolicy" / "tokens.yaml"
    path.parent.mkdir()
    path.touch(0o600)
    return path


@pytest.mark.parametrize(
    ("host", "variable"),
    [
        ("gpu1.lab", "ROBOPOLICY_TOKEN_GPU1_LAB"),
        ("gpu-1.lab", "ROBOPOLICY_TOKEN_GPU__1_LAB"),
        ("10.0.0.7", "ROBOPOLICY_TOKEN_10_0_0_7"),
        ("fe80::1", None),
        ("a_b", None),
    ],
)
def test_a_variable_names_one_host(host: str, variable: str | None) -> None:
    assert token_variable(host) == variable


def test_a_token_goes_to_its_host_alone(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("ROBOPOLICY_TOKEN", "of the server")
    monkeypatch.setenv("ROBOPOLICY_TOKEN_GPU1_LAB", "one")
    file.write_text("gpu2.lab: two\n'fe80::1': three\ngpu1.lab: older\n")
    assert token("wss://gpu1.lab:8765") == token("https://GPU1.lab./v1") == "one"
    assert token("wss://gpu2.lab") == "two" and token("wss://[fe80::1]:9") == "three"
    for other in ("wss://gpu1.lab.evil.example", "wss://gpu1-lab", "wss://evil.example", "ws://127.0.0.1:1"):
        assert token(other) == ""


@pytest.mark.parametrize("url", ["ws://gpu1.lab:8765", "http://gpu1.lab/v1", "ws://127.0.0.1.gpu1.lab"])
def test_a_token_is_not_sent_unencrypted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPU1_LAB", "127_0_0_1_GPU1_LAB"):
        monkeypatch.setenv(f"ROBOPOLICY_TOKEN_{name}", "secret")
    with pytest.raises(UserError, match=r"would be sent unencrypted; use (wss|https)://"):
        token(url)


@pytest.mark.parametrize("url", ["ws://127.0.0.1:1", "ws://localhost:1", "ws://[::1]:1", "http://127.8.8.8/v1"])
def test_loopback_addresses_share_a_token(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
    assert token(url) == "secret"


def test_the_file_is_private_and_valid(file: Path) -> None:
    file.write_text("gpu1.lab: secret\n")
    file.chmod(0o640)
    with pytest.raises(UserError, match=r"can be read by other users; run: chmod 600"):
        token("wss://gpu1.lab")
    file.chmod(0o600)
    for text in ("- 1\n", "gpu1.lab: 7\n", "{{{\n"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"tokens\.yaml (must contain lines|cannot be read)"):
            token("wss://gpu1.lab")
    file.write_text("gpu1.lab: 'a b'\n")
    with pytest.raises(UserError, match="without spaces"):
        token("wss://gpu1.lab")
    assert token_hint(urlsplit("wss://[fe80::1]")) == f"add 'fe80::1: TOKEN' to {file}"


def test_a_checkpoint_alone_sends_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose address comes from a manifest gets a request without the token of this machine's server."""
    monkeypatch.setenv("ROBOPOLICY_TOKEN", "secret")
    spec = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=4)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        opened = pool.submit(RemotePolicy(RemoteConfig(url=url, timeout=5.0), spec)._line.connection.open)
        client, _ = listener.accept()
        with client:
            request = client.recv(1 << 16)
        assert b"Upgrade: websocket" in request and b"Authorization" not in request
        assert opened.exception() is not None
    with pytest.raises(UserError, match="needs a token"):
        RemotePolicy(RemoteConfig(url="wss://evil.example:1"), spec)._line.connection.open()


def test_the_server_reads_its_own_variable_and_the_client_the_bound_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Shift(), ServerConfig(port=0, token="secret")) as server:
        monkeypatch.setenv("ROBOPOLICY_TOKEN", "secret")
        with pytest.raises(UserError, match=r"rejects the token .* set ROBOPOLICY_TOKEN_LOCALHOST"):
            ServerChunkPolicy(server.url)
        monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
        with closing(ServerChunkPolicy(server.url)) as source:
            assert source.spec.action_dim == 2
