"""Tests of server robustness: damaged messages, missing tokens, slow and lost clients, shutdown and restart."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fuzz_server import fuzz
from served_toys import Shift, connected, state, wait_until

from robopolicy.deploy.client import ClientConfig, Connection, ServerChunkPolicy
from robopolicy.deploy.server import ServerConfig, running
from robopolicy.errors import UserError
from robopolicy.tokens import SERVER_TOKEN

pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
pytest.importorskip("websockets", reason="needs robopolicy[remote]")
NOISE = np.zeros((1, 4, 2), np.float32)
OBS = {"state": np.zeros((1, 6), np.float32)}


def test_damaged_messages_get_an_error_and_do_not_affect_other_clients() -> None:
    with running(Shift()) as server, connected(server.url) as bystander:
        found = fuzz(server.url, 2000)
        assert found["errors"] > 1000 and found["closed"] > 3
        assert bystander.request(obs=state(2.0), noise=NOISE).chunk.mean() == 2.0
        wait_until(lambda: server.statistics.clients == 1)


def test_oversize_message_ends_only_its_own_connection() -> None:
    with (
        running(Shift(), ServerConfig(port=0, max_bytes=4096)) as server,
        connected(server.url) as big,
        connected(server.url) as small,
    ):
        with pytest.raises(UserError, match=r"too large for the endpoint .*4096"):
            big.request(obs={"state": np.zeros((1000, 1, 6))})
        assert small.request(obs=state(), noise=NOISE).chunk.shape == (1, 4, 2)


@pytest.mark.parametrize("shown", ["", "wrong", "secre", "secrets"])
def test_clients_without_the_token_are_refused(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Shift(), ServerConfig(port=0, token="secret")) as server:
        monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", shown)
        with pytest.raises(UserError, match="rejects the token"):
            ServerChunkPolicy(server.url)
        assert server.statistics.refused_clients == 1 and server.statistics.clients == 0
        monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
        with closing(ServerChunkPolicy(server.url)) as source:
            assert source.chunk(OBS).shape == (4, 2)


def test_web_pages_are_refused() -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with (
        running(Shift()) as server,
        pytest.raises(InvalidStatus, match="403"),
        connect(server.url, origin="http://example.org", proxy=None),  # type: ignore[arg-type]
    ):
        pass


def test_number_of_clients_is_limited() -> None:
    with running(Shift(), ServerConfig(port=0, max_clients=2)) as server:
        full = pytest.raises(ConnectionError, match="status 503")
        with connected(server.url), connected(server.url), full, connected(server.url):
            pass
        wait_until(lambda: server.statistics.clients == 0)
        with connected(server.url) as third:
            assert third.request(obs=state(), noise=NOISE).chunk.shape == (1, 4, 2)


def test_slow_clients_are_disconnected_and_do_not_delay_others() -> None:
    with running(Shift(), ServerConfig(port=0, open_timeout=0.3, ping=0.3)) as server:
        port = int(server.url.rsplit(":", 1)[1])
        drops = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for drop in drops:
            drop.sendall(b"GET / HT")  # an incomplete request
        stuck = Connection(server.url, 5.0)
        stuck.open()
        raw = stuck._socket._socket.socket  # type: ignore[union-attr]
        raw.sendall(b"\x82\xfe\xff\xff\x00\x00\x00\x00abc")  # a frame of 65535 bytes, of which 3 are sent
        with connected(server.url) as client:
            for _ in range(30):
                start = time.monotonic()
                client.request(obs=state(), noise=NOISE)
                assert time.monotonic() - start < 1.0
            wait_until(lambda: server.statistics.clients == 1)  # the stuck client times out
        for drop in drops:
            drop.settimeout(5)
            while drop.recv(4096):  # the server sends the reason and closes
                pass
            drop.close()
        stuck.close()


def test_client_lost_with_an_open_request_is_removed() -> None:
    served = Shift()
    with running(served) as server, connected(server.url) as other:
        served.gate.clear()
        served.batches.clear()
        gone = Connection(server.url, 0.2)
        with pytest.raises(TimeoutError, match=r"no reply within 0\.2 s"):
            gone.request(obs=state(3.0), noise=NOISE)
        served.gate.set()
        assert other.request(obs=state(), noise=NOISE).chunk.shape == (1, 4, 2)
        wait_until(lambda: server.statistics.clients == 1)


def test_stopping_server_answers_the_request_in_progress() -> None:
    served, found = Shift(), []
    with running(served) as server:
        source = Connection(server.url, 5.0)
        source.open()
        served.gate.clear()
        served.batches.clear()
        asking = threading.Thread(target=lambda: found.append(source.request(obs=state(3.0), noise=NOISE).chunk.mean()))
        asking.start()
        wait_until(lambda: served.batches == [1])
        threading.Timer(0.2, served.gate.set).start()
    asking.join(5)
    assert found == [3.0]
    with pytest.raises(OSError, match=r"closed|refused"):
        source.request(obs=state(), noise=NOISE)
    source.close()


def test_a_client_waits_for_a_server_that_is_killed_and_restarted() -> None:
    port = free_port()
    child = start_server(port)
    source = ServerChunkPolicy(f"ws://127.0.0.1:{port}", ClientConfig(reconnect_timeout=30.0))
    before = source.chunk(OBS)
    child.kill()
    child.wait()
    starter = threading.Timer(0.3, lambda: restarted.append(start_server(port)))
    restarted: list[subprocess.Popen[str]] = []
    starter.start()
    after = source.chunk(OBS)  # waits for the server
    assert before.shape == after.shape and source.round_trip.percentile(50) < 5.0
    starter.join()
    restarted[0].kill()
    restarted[0].wait()
    start = time.monotonic()
    with pytest.raises(UserError, match=r"cannot be reached \(.*\); start it") as refusal:
        ServerChunkPolicy(f"ws://127.0.0.1:{port}", ClientConfig(reconnect_timeout=0.2))
    assert 0.2 <= time.monotonic() - start < 5.0 and "\n" not in str(refusal.value)
    waiting = threading.Timer(0.2, source.close)  # from another thread, as a control loop does
    waiting.start()
    with pytest.raises(UserError, match="has been closed"):
        source.chunk(OBS)


def test_changed_policy_at_the_same_address_is_detected() -> None:
    port = free_port()
    with running(Shift(), ServerConfig(port=port)):
        source = ServerChunkPolicy(f"ws://127.0.0.1:{port}")
        source.chunk(OBS)
    with (
        running(Shift(prefix=False), ServerConfig(port=port)),
        pytest.raises(UserError, match=r"now serves another policy \('shift'\)"),
    ):
        source.chunk(OBS)
    source.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_shut_the_server_down_cleanly(number: signal.Signals) -> None:
    child = start_server(free_port())
    child.send_signal(number)
    assert child.wait(10) == 0
    assert child.stdout is not None and "0 requests, 0 errors" in child.stdout.read()


def test_a_client_needs_no_torch() -> None:
    code = (
        "import sys, robopolicy.deploy.client, robopolicy.deploy.server, robopolicy.deploy.chunk_buffer\n"
        "sys.exit(bool({'torch', 'mujoco'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


SERVER = """
import sys
sys.path.insert(0, sys.argv[1])
from fuzz_server import fuzz
from served_toys import Shift
from robopolicy.deploy.server import ServerConfig, serve
print_now = lambda line: print(line, flush=True)
serve(Shift(), ServerConfig(port=int(sys.argv[2])), print_now, lambda server: print_now(server.url))
"""


def start_server(port: int) -> subprocess.Popen[str]:
    """Start a server in its own process; return once it listens."""
    words = [sys.executable, "-c", SERVER, str(Path(__file__).parent), str(port)]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {SERVER_TOKEN: ""})
    assert child.stdout is not None and child.stdout.readline().startswith("ws://")
    return child


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_requests_of_clients_that_have_left_are_not_computed() -> None:
    policy = Shift()
    with running(policy) as server:
        policy.gate.clear()
        before = len(policy.batches)
        for _ in range(3):  # the first one is computed when its client leaves
            leaving = Connection(server.url, 0.05)
            leaving.open()
            with pytest.raises(OSError):
                leaving.request(obs=state(3.0), noise=NOISE)
        with connected(server.url) as staying:
            wait_until(lambda: server.statistics.clients == 1)
            policy.gate.set()
            assert staying.request(obs=state(1.0), noise=NOISE).chunk.mean() == 1.0
        assert len(policy.batches) - before == 2
