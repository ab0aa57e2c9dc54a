"""Checkpoints of two composable point-mass policies and of a critic of their composition."""

import shutil

import pytest
import torch

from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.best_of_n import make_best_of_n
from robopolicy.policies.wrappers.composed import ComposedPolicy, compose
from robopolicy.training.checkpoint import load_policy, save_checkpoint

TASK = "toy/point_mass"


def expert(state, steps):
    """Chunks `(B, steps, 2)` of the point-mass controller, planned with the dynamics."""
    position, velocity, goal = state.split(2, 1)
    chunk = []
    for _ in range(steps):
        chunk.append((3.0 * (goal - position) - 1.5 * velocity).clamp(-1, 1))
        velocity = 0.9 * velocity + 0.4 * chunk[-1]
        position = position + 0.1 * velocity
    return torch.stack(chunk, 1)


def trained(policy, side):
    """Imitate the expert on states with the goal on one side."""
    torch.manual_seed(1)
    state = torch.rand(2048, 6) * 2 - 1
    state[:, 4] = side * state[:, 4].abs()
    chunk = expert(state, policy.spec.horizon)
    policy.fit_normalizer(
        {key: {"min": -torch.ones(n), "max": torch.ones(n)} for key, n in [("state", 6), ("action", 2)]}
    )
    obs = {"state": state[:, None].repeat_interleave(policy.spec.obs_horizon, 1)}
    optimizer = torch.optim.Adam(policy.parameters(), 2e-3)
    for _ in range(120):
        rows = torch.randint(2048, (256,))
        loss, _ = policy.imitation_loss({"state": obs["state"][rows]}, chunk[rows])
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    return policy


@pytest.fixture(scope="module")
def trained_parents(tmp_path_factory):
    """A flow and a diffusion policy with different data, chunks, observation histories and steps."""
    folder = tmp_path_factory.mktemp("parents")
    torch.manual_seed(0)
    flow = FlowPolicy(FlowConfig(steps=3, hidden=(48, 48)), PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2))
    spec = PolicySpec({"state": (6,)}, 2, horizon=2, action_horizon=2, obs_horizon=2)
    diffusion = DiffusionPolicy(DiffusionConfig(steps=4, hidden=(48, 48)), spec)
    for name, policy, side in (("left", flow, -1), ("right", diffusion, 1)):
        seen = {"state": torch.rand(4, policy.spec.obs_horizon, 6)}
        save_checkpoint(folder / name, trained(policy, side), task=TASK, obs_sample=seen)
    return folder


@pytest.fixture
def parents(trained_parents, tmp_path, monkeypatch):
    """Modifiable copies of the parents in the current folder."""
    for name in ("left", "right"):
        shutil.copytree(trained_parents / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return ["left", "right"]


def composed() -> ComposedPolicy:
    """The composition of the parents in the current folder."""
    return compose([load_policy(name)[0] for name in ("left", "right")])


def save_judge() -> None:
    """Write a critic of the composition to `judge` in the current folder."""
    both = composed()
    torch.manual_seed(2)
    judge = make_best_of_n(both, QEnsemble(CriticConfig(hidden=(8,)), both), candidates=2)
    save_checkpoint("judge", judge, task=TASK, obs_sample={"state": torch.rand(2, 2, 6)})
