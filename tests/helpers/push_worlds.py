"""Folders with world models, videos and policies of the push task."""

from pathlib import Path

import pytest
import torch
from films import push_films
from small_world import CONFIG, small_films

from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.schema import to_dict
from robopolicy.sim.registry import SimOptions, WorldOptions
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.world_sims import SCHEMA, WorldManifest, make_env, save_world
from robopolicy.worldmodel.backend import WorldSim
from robopolicy.worldmodel.latent import LatentWorldModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, two untrained world models whose manifests claim a passed gate, and two policies."""
    out = tmp_path_factory.mktemp("use")
    write_lerobot(push_films(8, size=16), out / "films", video=False)
    spec = small_films().spec
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = LatentWorldModel(CONFIG, spec).eval()
        torch.nn.init.constant_(model.outcome.judge[2].bias, -2.0)  # type: ignore[arg-type]  # predicts no success
        gate = {"passed": True, "reasons": []}
        facts = {"config": to_dict(CONFIG), "spec": to_dict(spec), "task": "toy/push", "ends_on_success": True}
        manifest = WorldManifest(SCHEMA, "latent", gate=gate, training={}, versions={}, commit=None, **facts)
        save_world(out / f"world{seed}", model, manifest)
        seen = {"gripper": (2,), "block": (2,)}
        flow = FlowConfig(steps=2, hidden=(8,))
        policy = FlowPolicy(flow, PolicySpec(seen, action_dim=2, horizon=4, action_horizon=2))
        ones = torch.ones(2)
        policy.fit_normalizer({key: {"min": -ones, "max": ones} for key in (*seen, "action")})
        sample = {key: torch.rand(3, 1, 2) for key in seen}
        save_checkpoint(out / f"policy{seed}", policy, task="toy/push", obs_sample=sample)
    return out


def world(folder: Path, backend: str = "world0", **settings) -> WorldSim:
    """A world model of `folder` as a simulator."""
    backend = ",".join(str(folder / name) for name in backend.split(","))
    sim = make_env("push", SimOptions(num_envs=3, backend=f"worldmodel:{backend}", world=WorldOptions(**settings)))
    assert isinstance(sim, WorldSim)
    return sim
