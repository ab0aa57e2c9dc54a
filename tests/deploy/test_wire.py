"""Tests of the wire format: messages round-trip, and invalid input is refused in one line."""

import tracemalloc

import numpy as np
import pytest

from robopolicy.deploy.wire import DTYPES, Greeting, Reply, Request, WireError, decode, encode
from robopolicy.policies.base import PolicySpec
from robopolicy.tokens import is_loopback

msgpack = pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
SPEC = PolicySpec({"state": (6,), "image.front": (3, 8, 8)}, action_dim=2, horizon=4, action_horizon=2, obs_horizon=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_round_trip_bit_for_bit(dtype: str) -> None:
    array = np.random.default_rng(0).integers(0, 2, (2, 3, 1)).astype(dtype)
    request = Request.unpack(Request(7, {"state": array, "empty": array[:, :0]}, None).pack())
    assert request.number == 7 and request.noise is None
    assert request.obs["state"].dtype == dtype and request.obs["empty"].shape == (2, 0, 1)
    np.testing.assert_array_equal(request.obs["state"], array)
    request.obs["state"][0] = 0  # the arrays are writable copies


def test_byte_order_and_strides_do_not_matter() -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    (arrived,) = Request.unpack(Request(0, {"state": array}).pack()).obs.values()
    np.testing.assert_array_equal(arrived, array)
    assert arrived.dtype == "<f4"


def test_messages_round_trip() -> None:
    greeting = Greeting(SPEC, "pi0", noise=True, prefix=True, network_calls=10)
    assert Greeting.unpack(greeting.pack()) == greeting
    chunk = np.ones((2, 4, 2), np.float32)
    reply = Reply.unpack(Reply(3, chunk, 0.25, stats={"clients": 2}).pack())
    assert (reply.number, reply.seconds, reply.error, reply.stats) == (3, 0.25, "", {"clients": 2})
    np.testing.assert_array_equal(reply.chunk, chunk)
    assert Reply.unpack(Reply(3, error="out of memory").pack()).error == "out of memory"
    request = Request.unpack(Request(4, {}, None, chunk, np.array([[2**63 - 1, 2]]), deadline=1, stats=True).pack())
    assert (request.number, request.deadline, request.stats) == (4, 1.0, True)
    assert request.streams is not None and request.streams.tolist() == [[2**63 - 1, 2]]
    np.testing.assert_array_equal(request.prefix, chunk)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ([1, 2], "expected a map, found"),
        ({"number": 1, "obs": {"state": 3}}, "expected an array 'state', found 3"),
        ({"number": "1", "obs": {}}, "expected 'number' of type int, found '1'"),
        ({"number": True, "obs": {}}, "expected 'number' of type int, found True"),
        ({"number": 1, "obs": []}, r"expected 'obs' of type dict, found \[\]"),
        ({"number": 1, "obs": {}, "noise": "x"}, "expected an array 'noise', found 'x'"),
        ({"number": 1, "obs": {}, "prefix": [1.0]}, r"expected an array 'prefix', found \[1.0\]"),
        ({"number": -1, "obs": {}}, r"expected 'number' in \[0, 281474976710655\], found -1"),
        ({"number": 1, "obs": {}, "streams": 2.5}, "expected an array 'streams', found 2.5"),
        ({"number": 1, "obs": {}, "deadline": 0}, "expected 'deadline' of more than 0 s, found 0"),
        ({"number": 1, "obs": {}, "deadline": float("nan")}, "expected 'deadline' of more than 0 s, found nan"),
        ({"number": 1, "obs": {}}, "expected 'stats' of type bool, found None"),
        ({"number": 1, "obs": {"a": msgpack.ExtType(1, b"x")}}, "expected MessagePack, found"),
        ([[0] * 1025], "expected MessagePack, found"),
        ([[[] for _ in range(1000)] for _ in range(5)], "expected at most 4096 lists and maps, found more"),
        ({"a": {"dtype": "|O", "shape": [1], "data": b"12345678"}}, r"expected an array of one of .* found '\|O'"),
        ({"a": {"dtype": "<f4", "shape": [2**40, 2**40], "data": b""}}, "expected 4835703278458516698824704 bytes"),
        ({"a": {"dtype": "<f4", "shape": [-1], "data": b""}}, r"expected the shape of an array, found \[-1\]"),
        (
            {"a": {"dtype": "<f4", "shape": [2], "data": b"1234"}},
            r"expected 8 bytes for an array of shape \(2,\), found 4",
        ),
        ({"a": {"dtype": "<f4", "shape": [1], "data": "1234"}}, "expected 4 bytes"),
    ],
)
def test_invalid_requests_are_refused_with_expected_and_found(message: object, expected: str) -> None:
    with pytest.raises(WireError, match=expected) as refusal:
        Request.unpack(msgpack.packb(message))
    assert "\n" not in str(refusal.value)


def test_other_protocols_texts_and_types_are_refused() -> None:
    with pytest.raises(WireError, match="expected a greeting of protocol 3, found 1"):
        Greeting.unpack(encode({"protocol": 1}))
    with pytest.raises(WireError, match="expected 'network_calls' of at least 1, found 0"):
        Greeting.unpack(Greeting(SPEC, network_calls=0).pack())
    with pytest.raises(WireError, match="expected a policy specification"):
        Greeting.unpack(encode({"protocol": 3, "spec": {"observation": 3}}))
    with pytest.raises(WireError, match="binary message, found the text 'hello'"):
        decode("hello")
    with pytest.raises(TypeError, match="cannot contain arrays of object"):
        encode({"a": np.array([print], dtype=object)})
    with pytest.raises(TypeError, match="cannot contain function"):
        encode({"a": is_loopback})


def test_damaged_messages_raise_only_wire_errors() -> None:
    rng = np.random.default_rng(0)
    good = Request(1, {"state": np.ones((2, 1, 6), np.float32)}, np.ones((2, 4, 2), np.float32)).pack()
    for _ in range(2000):
        damaged = bytearray(good[: rng.integers(1, len(good) + 1)])
        for place in rng.integers(0, len(damaged), rng.integers(0, 4)):
            damaged[place] = rng.integers(0, 256)
        try:
            Request.unpack(bytes(damaged))
        except WireError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("kind", [Greeting, Request, Reply])
def test_noise_and_false_lengths_allocate_little_memory(kind: type[Greeting] | type[Request] | type[Reply]) -> None:
    """Headers of lists, maps, bytes and texts claim up to 4 GiB; the memory depends only on the received bytes."""
    rng = np.random.default_rng(0)
    claims = (b"", b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9", b"\xdc", b"\xde")
    tracemalloc.start()
    try:
        for _ in range(800):
            start = claims[int(rng.integers(len(claims)))]
            with pytest.raises(WireError) as refusal:
                kind.unpack(start + (b"\xff\xff\xff\xff" if start else b"") + rng.bytes(int(rng.integers(100))))
            assert "\n" not in str(refusal.value)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_loopback_hosts_are_on_this_machine_only() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "10.0.0.2", "localhost.example", "example", ""))
