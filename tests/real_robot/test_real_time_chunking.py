"""Test that a checkpoint exported with `--rtc` continues the chunk in execution on the robot."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import NAMES, ScriptedLift, lift_chunk

from robopolicy.cli import main as cli
from robopolicy.cli.commands import COMMANDS
from robopolicy.deploy.bundle import open_bundle
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy_robots import cli as deploy_cli

pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
SPEC = PolicySpec({"state": (len(NAMES),)}, action_dim=5, horizon=8, action_horizon=4)


def demonstrations() -> tuple[np.ndarray, np.ndarray]:
    """Return the observations and chunks of the scripted policy in four episodes."""
    sim, policy, states = make_sim("manipulation/lift", SimOptions(num_envs=4)), ScriptedLift(), []
    obs = sim.reset(0)
    for _ in range(40):
        states.append(obs["state"].numpy().copy())
        obs = sim.step(policy.act({"state": obs["state"][:, None]})[:, 0]).obs
    sim.close()
    seen = np.concatenate(states)
    return seen, np.stack([lift_chunk(row, SPEC.horizon) for row in seen])


def train(folder: Path) -> None:
    """Train a small flow policy for a few seconds and save its checkpoint."""
    torch.manual_seed(0)
    seen, chunks = map(torch.from_numpy, demonstrations())
    policy_class = POLICIES["flow"]
    kind = policy_class.config_class
    policy: Any = policy_class(kind(hidden=(64, 64), steps=4), SPEC)  # type: ignore[call-arg]
    rows = {"state": seen, "action": chunks.reshape(-1, 5)}
    policy.fit_normalizer(
        {
            key: {"min": x.amin(0), "max": x.amax(0), "mean": x.mean(0), "std": x.std(0), "count": [len(x)]}
            for key, x in rows.items()
        }
    )
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for _ in range(300):
        index = torch.randint(len(seen), (64,))
        loss = policy.imitation_loss({"state": seen[index, None]}, chunks[index])[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_checkpoint(folder, policy.eval(), task="manipulation/lift", obs_sample={"state": seen[:4, None]})


class Slow:
    """A bundle that needs `seconds` more for a chunk; `pairs` holds each prefix and its chunk."""

    takes_prefix = True

    def __init__(self, folder: Path, seconds: float) -> None:
        self._bundle, self._seconds = open_bundle(folder), seconds
        self.spec, self.close, self.reset = self._bundle.spec, self._bundle.close, self._bundle.reset
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def chunk(self, obs: Any, prefix: Any = None) -> np.ndarray:
        time.sleep(self._seconds)
        chunk = self._bundle.chunk(obs, prefix)
        if prefix is not None:
            self.pairs.append((prefix, chunk))
        return chunk


@pytest.mark.slow
def test_a_trained_policy_continues_the_chunk_in_execution(monkeypatch: Any, tmp_path: Path) -> None:
    train(tmp_path / "checkpoint")
    assert cli.main(["export", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "bundle"), "--rtc"]) == 0
    monkeypatch.setitem(COMMANDS._rows, "deploy", deploy_cli.COMMAND)
    words = ["deploy", "--robot", "sim_panda", "--task", "lift", "--transport", "loopback", "--no-tui"]
    words += ["--chunk-blending", "rtc"]
    words += ["--policy", str(tmp_path / "bundle"), "--domain", str(100 + os.getpid() % 100)]
    assert cli.main([*words, "--check"]) == 0
    source = Slow(tmp_path / "bundle", 0.06)  # longer than an action, so at least one is committed
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    assert cli.main([*words, "--out", str(tmp_path / "r.json"), "--seconds", "3"]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ticks"] > 40 and not any(kind.startswith("policy") for kind in report["interventions"])
    assert len(source.pairs) >= 3
    for prefix, chunk in source.pairs:
        assert 1 <= len(prefix) < SPEC.horizon
        np.testing.assert_allclose(chunk[: len(prefix)], prefix, atol=1e-5)
    source.close()
