"""Tests of diffusion, EDM and few-step heads in behaviour cloning: weight averaging and verified checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.data.chunks import ChunkBatch
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.registry import POLICIES
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2, obs_horizon=2)
OBS = {"state": torch.linspace(-1, 1, 8 * 2 * 6).reshape(8, 2, 6)}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddim": ("diffusion", {"prediction": "v"}),
    "ddpm": ("diffusion", {"sampler": "ddpm", "steps": 20}),
    "edm": ("edm", {"solver": "heun"}),
    "shortcut": ("shortcut", {"steps": 2}),
    "meanflow": ("meanflow", {"dispersive_coef": 0.5}),
    "consistency": ("consistency", {"steps": 2}),
}
heads = pytest.mark.parametrize("head", HEADS)


def make(head: str) -> Policy:
    name, settings = HEADS[head]
    policy_class = POLICIES[name]
    config_class = policy_class.config_class
    torch.manual_seed(0)
    policy = policy_class(config_class(hidden=(16,), **settings), SPEC)  # type: ignore[call-arg]
    policy.fit_normalizer({key: {"min": [-1.0] * n, "max": [2.0] * n} for key, n in (("state", 6), ("action", 2))})
    return policy


def batch(seed: int) -> ChunkBatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(8, 4)
    mask[3, 2:] = 0
    return ChunkBatch(OBS, torch.rand(8, 4, 2, generator=generator), mask, torch.ones(8))


@heads
def test_after_the_first_update_the_average_is_the_online_policy(head: str) -> None:
    algorithm = BC(BCConfig(), make(head), total_updates=3)
    algorithm.update(batch(0))
    average, online = algorithm.inference_policy().state_dict(), algorithm.policy.state_dict()
    assert algorithm.inference_policy() is not algorithm.policy
    assert all(torch.equal(average[key], online[key]) for key in online)
    algorithm.update(batch(1))
    online = algorithm.policy.state_dict()
    assert not all(torch.equal(average[key], online[key]) for key in online)


@heads
def test_a_checkpoint_verifies_and_acts_the_same(head: str, tmp_path: Path) -> None:
    policy = make(head).eval()
    save_checkpoint(tmp_path / "best", policy, task="toy/point_mass", obs_sample=OBS)
    report = verify_checkpoint(tmp_path / "best")
    assert report.ok and report.max_error == 0.0
    loaded, manifest = load_policy(tmp_path / "best")
    assert manifest.network_calls == policy.nfe
    chunks = [p.act(OBS, generator=PerRowGenerator(range(8), [0] * 8)) for p in (policy, loaded)]
    assert torch.equal(chunks[0], chunks[1])
