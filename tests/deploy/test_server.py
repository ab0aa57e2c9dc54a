"""Tests of the policy server: each client receives the chunks of the policy, independent of the other clients."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_toys import IMAGES, SPEC, OneRobot, Shift, connected, state, wait_until

from robopolicy.deploy.batching import ServedChunkPolicy
from robopolicy.deploy.client import Connection, ServerChunkPolicy
from robopolicy.deploy.server import ServerConfig, running
from robopolicy.errors import UserError
from robopolicy.interop.remote import ServedPolicy, open_remote
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.registry import POLICIES

pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
pytest.importorskip("websockets", reason="needs robopolicy[remote]")
FREE = {"port": 0}
NOISE = np.random.default_rng(0).normal(size=(1, 4, 2)).astype(np.float32)


def flow() -> Any:
    policy_class = POLICIES["flow"]
    config_class = policy_class.config_class
    policy = policy_class(config_class(), SPEC)
    policy.fit_normalizer(
        {key: {"min": -torch.ones(n), "max": torch.ones(n)} for key, n in (("state", 6), ("action", 2))}
    )
    return policy.eval()


def test_served_policy_equals_the_policy() -> None:
    policy = flow()
    obs = {"state": torch.randn(5, 1, 6)}
    noise = torch.randn(5, 4, 2)
    with running(ServedPolicy(policy, "flow")) as server:
        remote = open_remote(server.url)
        assert remote.spec == SPEC and remote.is_steerable and remote.config.model == "flow"
        assert remote.nfe == policy.nfe
        assert torch.equal(remote.decode(obs, noise), policy.decode(obs, noise))
        remote.close()
        with connected(server.url) as client:
            sent = {"state": obs["state"].numpy()}
            first = client.request(obs=sent, streams=np.array([[9, row] for row in range(5)])).chunk
            streams = PerRowGenerator([9] * 5, range(5))
            np.testing.assert_array_equal(first, policy.act(obs, generator=streams).detach().numpy())
            chunks = [client.request(obs=sent).chunk for _ in range(2)]
            assert not np.array_equal(*chunks)  # streams of the server: the request number enters
            for wrong in (np.array([[9, 0]]), np.full((5, 2), -1), np.zeros((5, 2))):
                with pytest.raises(
                    UserError, match=r"Expected streams of shape \(5, 2\) as int64 numbers of at least 0"
                ):
                    client.request(obs=sent, streams=wrong)


def test_served_policy_continues_a_prefix() -> None:
    prefix = np.full((3, 2, 2), 0.1, np.float32)
    with running(ServedPolicy(flow())) as server, connected(server.url) as client:
        assert open_remote(server.url).spec == SPEC
        obs = {"state": np.zeros((3, 1, 6))}
        for noise in (None, np.zeros((3, 4, 2), np.float32)):
            chunk = client.request(obs=obs, noise=noise, prefix=prefix).chunk
            np.testing.assert_array_equal(chunk[:, :2], prefix)
            assert np.isfinite(chunk).all() and np.ptp(chunk[:, 2:]) > 0


def test_replies_do_not_depend_on_other_requests_of_the_batch() -> None:
    rng = np.random.default_rng(0)
    requests = [(rng.normal(size=(rows, 1, 6)).astype(np.float32), seed) for seed, rows in enumerate((1, 3, 1, 2) * 3)]

    def ask(server: Any, obs: np.ndarray, seed: int) -> np.ndarray:
        with connected(server.url) as client:
            barrier.wait(5)
            streams = np.array([[seed, row] for row in range(len(obs))])
            return client.request(obs={"state": obs}, streams=streams).chunk

    policy, answers = flow(), {}
    for max_batch, together in ((1, 1), (8, 1), (1, len(requests)), (8, len(requests))):
        barrier = threading.Barrier(together)
        with (
            running(ServedPolicy(policy), ServerConfig(**FREE, max_batch=max_batch, window=0.05)) as server,
            ThreadPoolExecutor(together) as pool,
        ):
            answers[max_batch, together] = list(pool.map(lambda pair, server=server: ask(server, *pair), requests))
            shared = server.statistics.largest_batch
            assert shared == 1 if max_batch == 1 else shared >= 3 + (together > 1)
    alone = answers.pop((1, 1))
    for a, b in zip(alone, answers.pop((1, len(requests))), strict=True):
        np.testing.assert_array_equal(a, b)
    for found in answers.values():
        for a, b in zip(alone, found, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


def test_requests_share_a_call_and_do_not_wait_for_disconnected_clients() -> None:
    served = Shift()
    with running(served, ServerConfig(**FREE, window=0.5)) as server, ThreadPoolExecutor(4) as pool:
        clients = [Connection(server.url, 5.0) for _ in range(4)]
        for client in clients:
            client.open()
        served.batches.clear()
        start = time.monotonic()
        list(pool.map(lambda client: client.request(obs=state(), noise=NOISE), clients))
        assert served.batches == [4] and time.monotonic() - start < 0.4  # all have sent a request, so the window ends
        for client in clients[1:]:
            client.close()
        wait_until(lambda: server.statistics.clients == 1)
        start = time.monotonic()
        clients[0].request(obs=state(), noise=NOISE)
        assert time.monotonic() - start < 0.4
        clients[0].close()


def test_bad_request_does_not_affect_other_requests() -> None:
    served = Shift()
    with running(served, ServerConfig(**FREE, window=0.2)) as server, ThreadPoolExecutor(4) as pool:
        clients = [Connection(server.url, 5.0) for _ in range(4)]
        for client in clients:
            client.open()

        def ask(client: Connection, position: float) -> str:
            try:
                return str(float(client.request(obs=state(position), noise=0 * NOISE).chunk.mean()))
            except UserError as error:
                return str(error)

        for _ in range(3):
            found = list(pool.map(ask, clients, (1.0, 5.0, 7.0, 2.0)))
            assert (found[0], found[3]) == ("1.0", "2.0")
            assert found[1].endswith("returned no chunk: RuntimeError: out of memory")
            assert found[2].endswith("The policy returned a non-finite action.")
        for client in clients:
            client.close()


IMAGE = np.zeros((2, 2, 3, 4, 4), np.uint8)
GOOD = {"state": np.zeros((2, 2, 6)), "image.front": IMAGE}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"obs": {}}, "'state' is missing, got none"),
        ({"obs": {"state": GOOD["state"]}}, "'image.front' is missing, got state"),
        ({"obs": GOOD | {"state": np.zeros((2, 2, 5))}}, r"Expected 'state' of shape \(B, 2, 6\), found \(2, 2, 5\)"),
        ({"obs": GOOD | {"state": np.zeros((2, 6))}}, r"Expected 'state' of shape \(B, 2, 6\), found \(2, 6\)"),
        ({"obs": GOOD | {"state": np.array(3.0)}}, r"Expected 'state' of shape .*, found \(\)"),
        ({"obs": {key: value[:0] for key, value in GOOD.items()}}, r"Expected 'state' of shape .*, found \(0, 2, 6\)"),
        ({"obs": GOOD | {"image.front": IMAGE[:1]}}, "Expected 'image.front' with 2 rows like the others, found 1"),
        ({"obs": GOOD | {"image.front": IMAGE / 1.0}}, r"'image.front' as bytes \(uint8\), found float64"),
        ({"obs": GOOD | {"state": np.full((2, 2, 6), np.nan)}}, "finite numbers in 'state', found NaN or infinity"),
        ({"obs": GOOD | {"state": np.full((2, 2, 6), 1e300)}}, "finite numbers in 'state', found NaN or infinity"),
        ({"obs": GOOD, "noise": np.zeros((2, 4, 2))}, "does not accept noise"),
        ({"obs": GOOD, "prefix": np.zeros((2, 4, 2))}, "shorter than a chunk of 4 actions, found 4"),
        ({"obs": GOOD, "prefix": np.zeros((2, 2))}, r"prefix of shape \(B, d, 2\), found \(2, 2\)"),
        ({"obs": GOOD, "prefix": np.full((2, 1, 2), np.inf)}, "finite numbers in prefix"),
    ],
)
def test_invalid_request_gets_one_line_and_the_next_request_gets_its_chunk(fields: Any, message: str) -> None:
    with running(Shift(IMAGES, noise=False)) as server, connected(server.url) as client:
        with pytest.raises(UserError, match=message) as refusal:
            client.request(**fields)
        assert "\n" not in str(refusal.value)
        assert client.request(obs=GOOD).chunk.shape == (2, 4, 2)
        assert server.statistics.errors == 1 and server.statistics.requests == 2


def test_prefixes_of_different_lengths_are_not_batched_together() -> None:
    with running(Shift(), ServerConfig(**FREE, window=0.1)) as server, ThreadPoolExecutor(3) as pool:
        clients = [Connection(server.url, 5.0) for _ in range(3)]
        prefixes = [None, np.full((1, 1, 2), 5.0), np.full((1, 3, 2), 6.0)]
        found = list(
            pool.map(lambda c, p: c.request(obs=state(), noise=0 * NOISE, prefix=p).chunk.mean(), clients, prefixes)
        )
        assert found == [1.0, 5.0, 6.0]
        for client in clients:
            client.close()


def test_missed_deadlines_are_counted_and_late_requests_are_not_computed() -> None:
    served = Shift()
    with (
        running(served, ServerConfig(**FREE, window=0.0)) as server,
        ThreadPoolExecutor(1) as pool,
        connected(server.url) as slow,
        connected(server.url) as quick,
    ):
        served.gate.clear()
        served.batches.clear()
        waiting = pool.submit(slow.request, obs=state(3.0), noise=NOISE, deadline=0.3)
        wait_until(lambda: served.batches == [1])
        threading.Timer(0.4, served.gate.set).start()
        with pytest.raises(UserError, match="The deadline passed before the request was computed"):
            quick.request(obs=state(), noise=NOISE, deadline=0.01)
        assert waiting.result().chunk.shape == (1, 4, 2)  # late, but already in progress: the client may still align it
        assert served.batches == [1]
        quick.request(obs=state(), noise=NOISE, deadline=10.0)
        assert slow.request(stats=True).stats["deadline_misses"] == 2


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "uint16", "uint32", "uint64", "float16", "longdouble", ">f4"]
)
def test_observations_of_every_number_type_are_accepted(dtype: str) -> None:
    with (
        running(ServedChunkPolicy(OneRobot(), "robot"), ServerConfig(**FREE)) as server,
        closing(ServerChunkPolicy(server.url)) as source,
    ):
        chunk = source.chunk({"state": np.ones((1, 6), dtype)}, np.full((1, 2), 9, np.int16))
        assert chunk.tolist() == [[9.0, 9.0]] + [[1.0, 1.0]] * 3


def test_observations_of_other_types_are_refused_before_they_are_sent() -> None:
    with (
        running(Shift(IMAGES), ServerConfig(**FREE)) as server,
        closing(ServerChunkPolicy(server.url)) as source,
    ):
        obs = {"state": np.ones((2, 6)), "image.front": np.zeros((2, 3, 4, 4), np.uint8)}
        assert source.chunk(obs).shape == (4, 2)
        with pytest.raises(UserError, match=r"'image\.front' must be uint8, found int16"):
            source.chunk({**obs, "image.front": np.zeros((2, 3, 4, 4), np.int16)})
        with pytest.raises(UserError, match="'state' must be numbers, found <U1"):
            source.chunk({**obs, "state": np.full((2, 6), "x")})


def test_statistics_are_sent_on_request_and_logged() -> None:
    lines: list[str] = []
    with running(Shift(), ServerConfig(**FREE, log_every=0.05), lines.append) as server:
        with closing(ServerChunkPolicy(server.url)) as source:
            for _ in range(20):
                source.chunk({"state": np.zeros((1, 6))})
            found = source.statistics()
            assert found["requests"] == 20 and found["clients"] == 1 and found["errors"] == 0
            assert 0 < found["compute_p50_ms"] <= found["latency_p50_ms"] <= found["latency_p99_ms"]
            assert found["batches"] == 20 and found["mean_batch"] == found["largest_batch"] == 1
            assert found["latency_p50_ms"] / 1e3 < source.round_trip.percentile(50)
        time.sleep(0.1)
    assert any("20 requests, 0 errors" in line for line in lines)


def test_policy_of_one_robot_is_served() -> None:
    with running(ServedChunkPolicy(OneRobot(), "robot")) as server:
        with closing(ServerChunkPolicy(server.url)) as source:
            assert source.spec == SPEC and source.takes_prefix and not source.greeting.noise
            chunk = source.chunk({"state": np.full((1, 6), 2.0)}, np.full((1, 2), 9.0))
            assert chunk.dtype == np.float32 and chunk.tolist() == [[9.0, 9.0]] + [[2.0, 2.0]] * 3
        with connected(server.url) as client:
            rows = np.arange(3.0).reshape(3, 1, 1).repeat(6, 2)
            assert client.request(obs={"state": rows}).chunk[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


def test_policy_without_a_valid_chunk_is_not_served() -> None:
    class Broken(Shift):
        def chunks(self, *args: Any) -> np.ndarray:
            return np.zeros((1, 3, 2))

    with pytest.raises(UserError, match=r"returned shape \(1, 3, 2\)"), running(Broken()):
        pass
    policy_class = POLICIES["gaussian"]
    config_class = policy_class.config_class
    recurrent = policy_class(config_class(recurrent=RecurrentConfig(kind="gru")), SPEC)
    with pytest.raises(UserError, match="recurrent policy cannot be served"):
        ServedPolicy(recurrent)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "0.0.0.0 can be reached from other machines, so the server needs a token"),
        ({"host": "::"}, "needs a token"),
        ({"token": "two words"}, "without spaces"),
        ({"tls_cert": Path("cert.pem")}, "both a certificate and its key"),
        ({"port": 70_000}, r"\[0, 65535\]"),
        ({"max_batch": 0}, "max_batch >= 1"),
        ({"max_bytes": 10}, "max_bytes in"),
        ({"window": -1.0}, "not negative"),
        ({"window": float("nan")}, "must be finite and not negative"),
    ],
)
def test_invalid_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerConfig(**settings)
    assert "secret" not in repr(ServerConfig(token="secret"))


@pytest.mark.parametrize("package", ["msgpack", "websockets.asyncio.server"])
def test_missing_package_is_named_before_the_server_listens(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"run: pip install 'robopolicy\[remote\]'"), running(Shift()):
        pass


def test_an_address_in_use_is_named() -> None:
    with running(Shift()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with (
            pytest.raises(UserError, match=f"Cannot listen on 127.0.0.1:{port}"),
            running(Shift(), ServerConfig(port=port)),
        ):
            pass


def test_tls_requires_a_trusted_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -keyout {key} -out {cert}"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(["openssl", *words.split(), *name], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs openssl")
    with (
        pytest.raises(UserError, match="not PEM files of a certificate and its key"),
        running(Shift(), ServerConfig(**FREE, tls_cert=key, tls_key=cert)),
    ):
        pass
    monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
    with running(Shift(), ServerConfig(**FREE, token="secret", tls_cert=cert, tls_key=key)) as server:
        assert server.url.startswith("wss://")
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(UserError, match=r"is not trusted .*self.signed.*SSL_CERT_FILE"):
            ServerChunkPolicy(server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with closing(ServerChunkPolicy(server.url)) as source:
            assert source.chunk({"state": np.zeros((1, 6))}).shape == (4, 2)


def test_a_port_that_is_taken_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=0, openpi_port=taken.getsockname()[1])
        threads = threading.active_count()
        for _ in range(2):
            with pytest.raises(UserError, match="Cannot listen on 127"), running(Shift(), config):
                pass
        assert threading.active_count() == threads
