"""Test on a ring of six goals: fine-tuning moves mass to the one rewarded goal and not to the space between goals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.dppo import DPPO, DPPOConfig
from robopolicy.algorithms.flow_grpo import FlowGRPO, FlowGRPOConfig
from robopolicy.algorithms.flow_sde import FlowSDE, FlowSDEConfig
from robopolicy.algorithms.reinflow import ReinFlow, ReinFlowConfig
from robopolicy.data.batches import GroupRollout, Rollout
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy

ANGLES = torch.arange(6) * math.pi / 3
GOALS = 0.8 * torch.stack([ANGLES.cos(), ANGLES.sin()], 1)
SPEC = PolicySpec({"state": (1,)}, action_dim=2)
ROWS = 512
OBS = {"state": torch.zeros(ROWS, 1, 1)}
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity", "hidden": (128, 128)}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def imitated(policy: Policy) -> Policy:
    optimizer = torch.optim.Adam(policy.parameters())
    for update in range(1000):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - update / 1000)
        goals = GOALS[torch.randint(6, (ROWS,))] + 0.05 * torch.randn(ROWS, 2)
        loss = policy.imitation_loss(OBS, goals[:, None])[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def reached(chunk: Tensor) -> Tensor:
    """Whether the actions `(B, 1, 2)` reach each goal, `(B, 6)`."""
    return (chunk - GOALS).norm(dim=-1) < 0.3


def dppo() -> DPPO:
    head = imitated(DiffusionPolicy(DiffusionConfig(**RAW, steps=8, sampler="ddpm"), SPEC))
    config = DPPOConfig(trained_steps=4, batch_size=256, lr=1e-3, clip=0.1, clip_base=0.02)
    return DPPO(config, head, total_updates=20)


def flow() -> Policy:
    return imitated(FlowPolicy(FlowConfig(**RAW, steps=8), SPEC))


MAKERS: dict[str, Callable[[], Any]] = {
    "dppo": dppo,
    "reinflow": lambda: ReinFlow(
        ReinFlowConfig(batch_size=256, lr=1e-3, clip=0.05, logp_clamp=None, target_kl=None), flow(), total_updates=20
    ),
    "flow_sde": lambda: FlowSDE(
        FlowSDEConfig(batch_size=256, lr=1e-3, clip=0.05, target_kl=None), flow(), total_updates=20
    ),
    "flow_grpo": lambda: FlowGRPO(
        FlowGRPOConfig(batch_size=256, lr=1e-3, clip=0.05, kl_coef=0.0), flow(), total_updates=20
    ),
}


def experience(algorithm: Any) -> Rollout:
    sample = algorithm.act(OBS)
    reward = reached(sample.chunk)[:, 0].float()[None]
    ones, first = torch.ones(1, ROWS, dtype=torch.bool), {"state": OBS["state"][None]}
    record = {key: value[None] for key, value in sample.record.items()}
    parts = (first, record, sample.logp[None], reward, ones.long(), ones, ~ones, {"state": OBS["state"][:0]}, OBS)
    if algorithm.data_source == "group":
        return GroupRollout(*parts, group=torch.arange(ROWS) // 16, valid=ones)
    return Rollout(*parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_probability_mass_moves_to_the_rewarded_goal(name: str) -> None:
    algorithm = MAKERS[name]()
    before = reached(algorithm.inference_policy().act(OBS)).float().mean(0)
    assert float(before.min()) > 0.05  # the imitated policy covers every goal
    for _ in range(20):
        algorithm.update(experience(algorithm))
    after = reached(algorithm.inference_policy().act(OBS)).float().mean(0)
    assert float(after[0]) > 3 * float(before[0]) and float(after.sum()) > float(before.sum())
