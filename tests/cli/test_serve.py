"""Tests of `robopolicy serve`: serving a checkpoint or a bundle, and error messages."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.cli import serve
from robopolicy.cli.main import main, parse
from robopolicy.deploy.bundle import MANIFEST
from robopolicy.deploy.client import ServerChunkPolicy
from robopolicy.deploy.wire import Greeting
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.registry import POLICIES
from robopolicy.tokens import SERVER_TOKEN
from robopolicy.training.checkpoint import save_checkpoint

pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
pytest.importorskip("websockets", reason="needs robopolicy[remote]")
SPEC = PolicySpec({"state": (6,)}, 2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    policy_class = POLICIES["gaussian"]
    config_class = policy_class.config_class
    policy = policy_class(config_class(), SPEC)
    seen = {"state": torch.randn(4, 1, 6)}
    policy.encoder.normalizer.update(seen["state"][:, 0])
    save_checkpoint(tmp_path / "ckpt", policy, task="toy/point_mass", obs_sample=seen)
    return tmp_path / "ckpt"


def test_a_checkpoint_is_served_imported_and_evaluated(checkpoint: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "robopolicy", "serve", str(checkpoint), "--port", "0"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {SERVER_TOKEN: ""})
    try:
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first.startswith(f"serving {checkpoint} at ws://127.0.0.1:")
        url = first.split(" at ")[1].split(": chunks")[0]
        with closing(ServerChunkPolicy(url)) as source:
            assert source.spec == SPEC and source.greeting.model.startswith(f"{tmp_path.name}/ckpt@")
            assert source.chunk({"state": np.zeros((1, 6))}).shape == (1, 2)
        there = str(tmp_path / "there")
        assert main(["import", "remote", url, "--task", "point_mass", "--out", there]) == 0
        assert main(["verify", there]) == 0
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    assert "requests, 0 errors" in child.stdout.read()


def test_a_bundle_is_served_with_its_own_noise(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bundle:
        spec, takes_prefix = SPEC, True
        manifest = SimpleNamespace(policy_spec=SPEC, identity="0123456789abcdef", noise_shape=[1, 2], network_calls=4)

        def chunk(self, obs: Any, prefix: Any = None, *, noise: Any = None) -> np.ndarray:
            return noise

    (tmp_path / MANIFEST).write_text("{}")
    monkeypatch.setattr("robopolicy.deploy.bundle.open_bundle", lambda path: Bundle())
    served = serve._load(parse(["serve", str(tmp_path)]))
    assert served.greeting == Greeting(SPEC, f"{tmp_path.name}@0123456789ab", noise=True, prefix=True, network_calls=4)
    obs, streams = {"state": np.zeros((2, 1, 6), np.float32)}, [(2**64 - 1, 1 << 16), (3, 5)]
    sampled = PerRowGenerator(*zip(*streams, strict=True)).normal((2, 1, 2)).numpy()
    np.testing.assert_array_equal(served.chunks(obs, None, None, streams), sampled)
    np.testing.assert_array_equal(served.chunks(obs, 2 * sampled, None, streams), 2 * sampled)
    Bundle.manifest.policy_spec = PolicySpec({"state": (6,), "memory": (8,)}, 2)
    assert "recurrent policy cannot be served" in refused("serve", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines, so the server needs a token"),
        (["--tls-cert", "cert.pem"], "TLS needs both a certificate and its key"),
        (["--port", "70000"], "A port must lie in [0, 65535], got 70000."),
        (["--max-batch", "0"], "--max-batch must be at least 1"),
        (["--batch-delay-ms", "-1"], "not negative"),
        (["--port", "http"], "invalid int value: 'http'"),
        (["--batch-delay", "3"], "Did you mean '--batch-delay-ms'?"),
        ([], "nowhere"),
    ],
)
def test_bad_input_gives_one_line(
    words: list[str], message: str, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVER_TOKEN, raising=False)
    assert message in refused("serve", "nowhere", *words)


def test_token_is_read_from_the_named_variable(
    checkpoint: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER", "two words")
    assert "without spaces" in refused("serve", checkpoint, "--token-env", "OTHER")
    assert "The variable NOPE of --token-env contains no token." in refused("serve", checkpoint, "--token-env", "NOPE")
