"""Tests of the server for clients of openpi: chunks of the policy, one-line errors, and bounded messages."""

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from served_toys import IMAGES, SPEC, Shift

from robopolicy.deploy.openpi import OpenpiConnection, OpenpiSession, decode, encode, request_names
from robopolicy.deploy.server import ServerConfig, running
from robopolicy.deploy.wire import Greeting, Reply, WireError
from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec

msgpack = pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
pytest.importorskip("websockets", reason="needs robopolicy[remote]")
NAMES = {"image.front": "observation/image"}
STATE = np.arange(6, dtype=np.float32)
NOISE = np.zeros((4, 2), np.float32)


@contextmanager
def serving(spec: PolicySpec = SPEC, token: str = "", **names: str) -> Iterator[Any]:
    config = ServerConfig(port=0, openpi_port=0, openpi_names=names, token=token)
    with running(Shift(spec), config) as server:
        yield server


@contextmanager
def client(url: str) -> Iterator[OpenpiConnection]:
    connection = OpenpiConnection(url, 5.0)
    try:
        yield connection
    finally:
        connection.close()


def openpi_client(url: str, key: str | None = None) -> Any:
    package = pytest.importorskip("openpi_client.websocket_client_policy", reason="needs openpi-client")
    return package.WebsocketClientPolicy(url, api_key=key)


def test_openpi_client_gets_the_chunks_of_the_policy_and_our_client_the_same() -> None:
    with serving() as server, client(server.openpi_url) as ours:
        theirs = openpi_client(server.openpi_url)
        metadata = theirs.get_server_metadata()
        assert metadata == ours.open() and metadata["observation"] == {"observation/state": [6]}
        assert (metadata["protocol"], metadata["horizon"], metadata["noise"]) == ("openpi", 4, True)
        request = {"observation/state": STATE, "prompt": "push", "noise": NOISE + 0.5}
        found = theirs.infer(request)
        assert found["actions"].dtype == np.float32 and found["server_timing"]["infer_ms"] > 0
        np.testing.assert_array_equal(found["actions"], np.tile(STATE[:2] + 0.5, (4, 1)))
        np.testing.assert_array_equal(ours.infer(request)["actions"], found["actions"])
        with pytest.raises(RuntimeError, match="expected 'observation/state', found no 'observation/state'"):
            theirs.infer({"prompt": "nothing"})
        assert theirs.infer(request)["actions"].shape == (4, 2)  # the connection stays


def test_action_chunk_broker_executes_our_chunks() -> None:
    broker = pytest.importorskip("openpi_client.action_chunk_broker", reason="needs openpi-client")
    with serving() as server:
        actions = broker.ActionChunkBroker(openpi_client(server.openpi_url), 4)
        found = [
            actions.infer({"observation/state": STATE + 10 * step, "noise": NOISE})["actions"] for step in range(5)
        ]
        np.testing.assert_array_equal(found, [STATE[:2]] * 4 + [STATE[:2] + 40])


def test_token_is_required_except_for_the_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(token="secret") as server:
        port = int(server.openpi_url.rsplit(":", 1)[1])
        page = http.client.HTTPConnection("127.0.0.1", port)
        page.request("GET", "/healthz")
        assert page.getresponse().read() == b"OK\n"
        page.close()
        with pytest.raises(UserError, match="rejects the token"):
            OpenpiConnection(server.openpi_url, 5.0).open()
        monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
        with client(server.openpi_url) as ours:
            assert ours.infer({"observation/state": STATE})["actions"].shape == (4, 2)
        assert openpi_client(server.openpi_url, "secret").infer({"observation/state": STATE})["actions"].shape == (4, 2)
        with pytest.raises(Exception, match="401"):
            openpi_client(server.openpi_url, "wrong")


def test_both_ports_share_the_policy() -> None:
    from served_toys import connected, state

    with serving() as server, connected(server.url) as ours, client(server.openpi_url) as openpi:
        chunk = ours.request(obs=state(2.0), noise=NOISE[None]).chunk[0]
        found = openpi.infer({"observation/state": np.full(6, 2.0), "noise": NOISE})["actions"]
        np.testing.assert_array_equal(found, chunk)
        assert server.statistics.clients == 2


def session(spec: PolicySpec = IMAGES) -> OpenpiSession:
    return OpenpiSession(Greeting(spec, "toy", noise=True), request_names(spec, NAMES if spec is IMAGES else {}))


NUMBERS = {"observation/state": np.zeros(6), "observation/image": np.zeros((4, 4, 3), np.uint8)}
CHUNK = Reply(0, np.zeros((1, 4, 2), np.float32))


def test_a_rejected_request_leaves_no_trace_in_the_history() -> None:
    talk = session()

    def ask(value: float, size: int = 4, error: str = "") -> Any:
        image = np.full((size, size, 3), value if value == value else 0, np.uint8)
        found = talk.read(encode({"observation/state": np.full(6, value), "observation/image": image}))
        talk.write(Reply(0, error=error) if error else CHUNK)
        return [found.obs[key][0].reshape(2, -1)[:, 0].tolist() for key in ("state", "image.front")]

    ask(1)
    with pytest.raises(WireError, match="observation/image"):
        ask(2, size=3)
    with pytest.raises(WireError, match="expected finite numbers in 'observation/state'"):
        ask(np.nan)
    ask(77, error="Expected numbers")
    assert ask(3) == [[1, 3], [1, 3]]


def test_history_is_filled_by_requests_and_cleared_by_a_reset() -> None:
    talk = session()

    def ask(value: float, **fields: Any) -> Any:
        image = np.zeros((4, 4, 3), np.uint8)
        request = {"observation/state": np.full(6, value), "observation/image": image, **fields}
        found = talk.read(encode(request))
        talk.write(Reply(0) if found is None else CHUNK)
        return None if found is None else found.obs["state"][0, :, 0].tolist()

    assert ask(1) == [1, 1] and ask(2) == [1, 2] and ask(3) == [2, 3]
    assert ask(0, endpoint="reset") is None and ask(4) == [4, 4]
    streams = [
        (talk.read(encode(NUMBERS | more)).streams, talk.write(CHUNK))[0] for more in ({}, {"seed": 5}, {"seed": 5})
    ]
    assert streams[0] is None and streams[1].tolist() == [[5, 2]] and streams[2].tolist() == [[5, 3]]
    assert talk.read(encode(NUMBERS | {"seed": 5, "step": 0})).streams.tolist() == [[5, 0]]  # type: ignore[union-attr]
    whole = {"observation/state": np.eye(6)[:2], "observation/image": np.zeros((2, 4, 4, 3), np.uint8)}
    assert talk.read(encode(whole)).obs["state"].shape == (1, 2, 6)  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["hwc", "chw", "float"])
def test_pictures_become_bytes_with_channels_first(layout: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.uint8)
    image[0, 0] = 0, 128, 255
    sent = {"hwc": image, "chw": image.transpose(2, 0, 1), "float": (image / 255).astype(np.float64)}[layout]
    found = session().read(encode({"observation/state": STATE, "observation/image": sent}))
    assert found is not None
    expected = (255 * (image / 255)).astype(np.uint8) if layout == "float" else image
    np.testing.assert_array_equal(found.obs["image.front"][0, 0], expected.transpose(2, 0, 1))


GOOD = {"observation/state": STATE, "observation/image": np.zeros((4, 4, 3), np.uint8)}


def marker(**fields: Any) -> dict[bytes, Any]:
    array = {"__ndarray__": True, "data": bytes(24), "dtype": "<f4", "shape": [6]}
    return {key.encode(): value for key, value in {**array, **fields}.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation/image": np.zeros((8, 8, 3), np.uint8)}, r"of shape \(4, 4, 3\), found \(8, 8, 3\); resize it"),
        ({"observation/image": np.zeros(48, np.uint8)}, r"of shape \(4, 4, 3\), found \(48,\)"),
        ({"observation/image": np.full((4, 4, 3), 2.0)}, r"as bytes, or as numbers in \[0, 1\]"),
        ({"observation/state": np.zeros(5)}, r"'observation/state' of shape \(6,\), found \(5,\)"),
        ({"observation/state": "far"}, "expected numbers in 'observation/state', found 'far'"),
        ({"observation/state": [[1.0], [1.0, 2.0]]}, "expected numbers in 'observation/state'"),
        ({"observation/state": marker(dtype="|O")}, "expected an array of numbers, found '|O'"),
        ({"observation/state": marker(dtype="<f1")}, "expected an array of numbers, found '<f1'"),
        ({"observation/state": marker(shape=[2**40])}, "expected 4398046511104 bytes"),
        ({"observation/state": marker(shape=[-6])}, "expected the shape of an array"),
        ({"observation/state": marker(data=None)}, "expected 24 bytes"),
        ({"observation/state": {b"__ndarray__": 1}}, "expected an array of numbers"),
        ({"observation/state": {b"__npgeneric__": True, b"data": b"x"}}, "expected a number, found b'x'"),
        ({"prompt": b"push"}, "expected 'prompt' as text, found b'push'"),
        ({"endpoint": "kill"}, "expected the endpoint 'infer' or 'reset', found 'kill'"),
        ({"seed": -1}, r"expected 'seed' as an integer in \[0, "),
    ],
)
def test_invalid_requests_get_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=message) as error:
        session().read(encode({**GOOD, **change}))
    assert "\n" not in str(error.value)


def test_messages_that_are_no_map_are_refused() -> None:
    for data in ("text", b"\xc1", msgpack.packb([1]), msgpack.packb(3)):
        with pytest.raises(WireError, match="expected"):
            session().read(data)


def test_not_finite_numbers_get_an_error_and_the_connection_stays() -> None:
    with serving() as server, client(server.openpi_url) as ours:
        with pytest.raises(UserError, match="finite numbers in 'observation/state'"):
            ours.infer({"observation/state": np.full(6, np.nan)})
        assert ours.infer({"observation/state": np.ones(6, ">f4"), "noise": NOISE})["actions"][0, 0] == 1


def test_numbers_and_arrays_survive_the_encoding() -> None:
    message = {"a": np.arange(6.0).reshape(2, 3), "b": np.float32(1.5), "c": [np.int64(3), "text"], "d": np.array(True)}
    found = decode(encode(message))
    np.testing.assert_array_equal(found["a"], message["a"])
    assert found["b"] == 1.5 and found["c"] == [3, "text"] and found["d"].dtype == bool
    with pytest.raises(TypeError, match="cannot contain object"):
        encode({"a": np.array([None])})


def test_names_of_observations_are_unique_and_known() -> None:
    spec = replace(IMAGES, observation={"front": (2,), "image.front": (3, 4, 4)})
    with pytest.raises(UserError, match=r"'front' and 'image\.front' would both be 'observation/front'"):
        request_names(spec, {})
    with pytest.raises(UserError, match=r"observes front, image\.front, not 'wrist'"):
        request_names(spec, {"wrist": "observation/wrist"})
