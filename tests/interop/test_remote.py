"""Tests of remote policies: chunks equal the server's, and failures raise clear messages."""

import copy
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from policy_server import SPEC, serving, shifted

from robopolicy.deploy.wire import Greeting, Reply, Request
from robopolicy.errors import UserError
from robopolicy.interop.remote import RemoteConfig, RemotePolicy, open_remote
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
pytest.importorskip("websockets", reason="needs robopolicy[remote]")
OBS = {"state": torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0)), "unused": torch.zeros(5, 1, 1)}


def expected(noise: torch.Tensor) -> torch.Tensor:
    return OBS["state"][:, -1:, :2] + noise


def test_remote_chunks_equal_the_servers_chunks_bitwise() -> None:
    with serving() as served:
        policy = open_remote(served.url, action_horizon=3, max_batch=2)
        assert policy.spec == PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=3) and policy.is_steerable
        noise = torch.randn(5, 4, 2)
        assert torch.equal(policy.decode(OBS, noise), expected(noise))
        assert torch.equal(copy.deepcopy(policy).decode(OBS, noise), policy.decode(OBS, noise))
        assert torch.equal(policy.act(OBS), expected(torch.zeros(5, 4, 2)))  # this server has no noise of its own
        assert [len(request.obs["state"]) for request in served.requests[:3]] == [2, 2, 1]
        assert list(served.requests[0].obs) == ["state"] and served.requests[0].noise is not None
        assert served.connections == 2  # one to read the greeting, one to act, shared by copies
        assert policy.meter.calls == 12 and policy.meter.rows == 20
        assert 0 < policy.meter.latency < 1 and 0 < policy.meter.percentile(50) <= policy.meter.percentile(95)
        policy.close()


def test_endpoint_without_noise_input_acts_but_cannot_be_steered() -> None:
    with serving(greeting=Greeting(SPEC, "plain")) as served:
        policy = open_remote(served.url)
        assert torch.equal(policy.act(OBS), expected(torch.zeros(5, 4, 2)))
        assert served.requests[-1].noise is None
        with pytest.raises(UserError, match="'remote' takes none"):
            LatentPolicy.from_base(policy, NoiseSpace(), STEERING_ACTOR)
        policy.close()


def test_lost_connection_is_reopened() -> None:
    with serving() as served:
        policy = open_remote(served.url, retries=1, retry_wait=0.0)
        policy.act(OBS)
        served.raw = lambda data: (_ for _ in ()).throw(ConnectionError("lost"))
        with pytest.raises(UserError, match=rf"{served.url} gave no chunk in 2 attempts"):
            policy.act(OBS)
        served.raw = None
        assert policy.act(OBS).shape == (5, 4, 2) and policy.meter.failures == 2
        policy.close()


def test_late_replies_are_requested_again_and_never_mixed_up() -> None:
    late = [True, False, True, True]
    done = threading.Event()

    def slow(request: Request) -> np.ndarray:
        if late.pop(0):
            done.wait()
        return shifted(request)

    with serving(chunk=slow) as served:
        policy = open_remote(served.url, timeout=0.5, retries=1, retry_wait=0.0)
        noise = torch.randn(5, 4, 2)
        assert torch.equal(policy.decode(OBS, noise), expected(noise)) and policy.meter.failures == 1
        with pytest.raises(UserError, match=r"in 2 attempts \(TimeoutError: no reply within 0\.5 s\)"):
            policy.decode(OBS, noise)
        done.set()
        policy.close()


def test_unreachable_endpoint_is_named() -> None:
    with serving() as served:
        url = served.url
    with pytest.raises(UserError, match=rf"{url} cannot be reached \(.*refused"):
        open_remote(url)
    policy = RemotePolicy(RemoteConfig(url=url, retries=1, retry_wait=0.0), SPEC)
    with pytest.raises(UserError, match=rf"{url} gave no chunk in 2 attempts \(ConnectionRefusedError"):
        policy.act(OBS)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (lambda data: b"\xc1garbage", "expected MessagePack, found"),
        (lambda data: "hello", "expected .*, found"),
        (lambda data: b"", "expected MessagePack, found b''"),
        (lambda data: Greeting(SPEC).pack(), "expected an array 'chunk', found None"),
        (lambda data: Reply(99, np.zeros((5, 4, 2))).pack(), "expected the reply to request 1, found one to 99"),
        (lambda data: Reply(1, error="CUDA out of memory\nmore").pack(), "returned no chunk: CUDA out of memory$"),
        (
            lambda data: Reply(1, np.zeros((5, 4, 3))).pack(),
            r"shape \(5, 4, 3\) instead of chunks of shape \(5, 4, 2\)",
        ),
        (lambda data: Reply(1, np.zeros((1, 4, 2))).pack(), r"shape \(1, 4, 2\) instead of"),
        (lambda data: Reply(1, np.full((5, 4, 2), np.nan)).pack(), "non-finite action"),
    ],
)
def test_invalid_replies_are_refused_without_retry(raw: object, message: str) -> None:
    with serving(raw=raw) as served:
        policy = open_remote(served.url, retry_wait=10.0)  # a second attempt would stall the test
        with pytest.raises(UserError, match=message) as refusal:
            policy.act(OBS)
        assert "\n" not in str(refusal.value)
        policy.close()


def test_endpoints_that_are_no_policy_server_are_refused() -> None:
    with (
        serving(greeting=Reply(1)) as served,  # type: ignore[arg-type]
        pytest.raises(UserError, match="is not a policy server: expected a greeting of protocol 3, found None"),
    ):
        open_remote(served.url)
    pages = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    threading.Thread(target=pages.serve_forever, args=(0.01,), daemon=True).start()
    with pytest.raises(UserError, match="is not a policy server: no websocket"):
        open_remote(f"ws://127.0.0.1:{pages.server_port}")
    pages.shutdown()
    pages.server_close()
    for url, message in [
        ("127.0.0.1:8765", "is not an address"),
        ("wss//host", "is not an address"),
        ("tcp://127.0.0.1:1", "Unknown scheme 'tcp'"),
        ("http://127.0.0.1:1", "Unknown scheme 'http'"),
        ("ws://127.0.0.1:99999", "is not an address"),
        ("ws://127.0.0.1:8765#x", "ends with a fragment; leave out '#x'"),
        ("ws://user:secret@127.0.0.1:1", "must not contain a password"),
    ]:
        with pytest.raises(UserError, match=message):
            open_remote(url)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (
            Greeting(PolicySpec({"state": (7,)}, 2, 4, 2), "shifted", noise=True),
            r"now has observation .*7.*, expected .*6",
        ),
        (Greeting(PolicySpec({"state": (6,)}, 3, 4, 2), "shifted", noise=True), "now has action_dim 3, expected 2"),
        (Greeting(SPEC, "shifted"), "no longer takes noise"),
        (Greeting(SPEC, "other", noise=True), "now serves 'other', expected 'shifted'"),
    ],
)
def test_endpoint_that_serves_another_policy_is_refused(greeting: Greeting, message: str) -> None:
    with serving() as served:
        policy = open_remote(served.url)
        served.greeting = greeting
        with pytest.raises(UserError, match=message):
            policy.act(OBS)


def test_tokens_are_required_for_other_machines_and_always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="needs a token; use wss:// and set ROBOPOLICY_"):
        open_remote("ws://10.255.255.1:1")
    with pytest.raises(UserError, match=r"needs a token; set ROBOPOLICY_TOKEN_GPU__1_LAB\.$"):
        open_remote("wss://gpu-1.lab:1")
    with serving(token="secret") as served:
        with pytest.raises(UserError, match="rejects the token"):
            open_remote(served.url)
        monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
        policy = open_remote(served.url)
        assert policy.act(OBS).shape == (5, 4, 2)
        assert "secret" not in str(policy.config_dict())
        policy.close()


def test_wrong_inputs_are_refused_before_anything_is_sent() -> None:
    policy = RemotePolicy(RemoteConfig(url="ws://127.0.0.1:1"), SPEC)
    with pytest.raises(UserError, match="needs the observation 'state', got pose"):
        policy.act({"pose": torch.zeros(2, 1, 6)})
    with pytest.raises(UserError, match=r"expects 'state' of shape \(B, 1, 6\), found \(B, 1, 5\)"):
        policy.act({"state": torch.zeros(2, 1, 5)})
    with pytest.raises(UserError, match=r"expects noise of shape \(B, 4, 2\), found \(B, 4, 3\)"):
        policy.decode({"state": torch.zeros(2, 1, 6)}, torch.zeros(2, 4, 3))


def test_checkpoint_stores_the_address_and_verifies_against_it(tmp_path) -> None:
    with serving() as served:
        policy = open_remote(served.url)
        save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample={"state": OBS["state"]})
        assert verify_checkpoint(tmp_path / "c").ok
        loaded, manifest = load_policy(tmp_path / "c")
        assert manifest.config["url"] == served.url and loaded.spec == policy.spec
        served.chunk = lambda request: shifted(request) + 1
        assert not verify_checkpoint(tmp_path / "c").ok  # the endpoint serves another policy now
        policy.close()
