"""Tests of behaviour cloning: loss, learning rate, gradient clipping, and deployed weights."""

import math
from typing import Any

import pytest
import torch

from robopolicy.algorithms.bc import BC, BCConfig, bc_loss
from robopolicy.data.chunks import ChunkBatch
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=4)
RAW: dict[str, Any] = {"hidden": (16,), "normalization": "identity", "action_normalization": "identity"}


def cloning(updates: int = 20, **config: Any) -> BC:
    torch.manual_seed(0)
    return BC(BCConfig(**config), FlowPolicy(FlowConfig(**RAW), SPEC), total_updates=updates)


def demonstrations() -> ChunkBatch:
    """Eight chunks with different weights; two of them are padded."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(8, 4)
    mask[3, 2:], mask[5, 1:] = 0, 0
    state, chunk = torch.randn(8, 1, 3, generator=generator), torch.randn(8, 4, 2, generator=generator)
    return ChunkBatch({"state": state}, chunk, mask, torch.linspace(0, 2, 8))


def test_the_loss_is_the_weighted_mean_over_unpadded_steps() -> None:
    policy, batch = cloning().policy, demonstrations()
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    loss, _ = bc_loss(policy, batch, generators[0])
    steps = policy.training_loss(policy.encode(batch.obs), batch.chunk, generators[1])  # type: ignore[operator]
    rows = torch.stack([row[valid.bool()].mean() for row, valid in zip(steps, batch.mask, strict=True)])
    torch.testing.assert_close(loss, (torch.linspace(0, 2, 8) * rows).mean())


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    algorithm, batch = cloning(updates=7, lr=0.01, warmup=3), demonstrations()
    rates = [algorithm.update(batch)["actor/lr"] for _ in range(7)]
    falling = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]  # would be 0 at the update after the last
    assert rates == pytest.approx([0.01 * factor for factor in (0.25, 0.5, 0.75, *falling)])


def test_the_optimiser_matches_diffusion_policy() -> None:
    algorithm = cloning()
    group = algorithm.optimizer.param_groups[0]
    assert isinstance(algorithm.optimizer, torch.optim.AdamW)
    assert (group["betas"], group["weight_decay"]) == ((0.95, 0.999), 1e-6)
    assert {id(p) for p in group["params"]} == {id(p) for p in algorithm.policy.parameters()}


@pytest.mark.parametrize("limit", [1e-3, 1e3])
def test_the_gradient_norm_is_clipped(limit: float) -> None:
    algorithm = cloning(grad_clip=limit)
    measured = algorithm.update(demonstrations())["actor/grad_norm"]  # before clipping
    length = torch.stack([p.grad.norm() for p in algorithm.policy.parameters() if p.grad is not None]).norm()
    assert 1e-3 < measured < 1e3 and float(length) == pytest.approx(min(measured, limit), rel=1e-3)


@pytest.mark.parametrize("ema", [True, False])
def test_averaged_weights_are_deployed_unless_disabled(ema: bool) -> None:
    algorithm = cloning(ema=ema, lr=0.1)
    for _ in range(3):
        algorithm.update(demonstrations())
    assert algorithm.policy.training  # augmentation and dropout are active in imitation
    assert (algorithm.inference_policy() is algorithm.policy) != ema
    trained, deployed = (list(policy.parameters()) for policy in (algorithm.policy, algorithm.inference_policy()))
    assert all(torch.equal(a, b) for a, b in zip(trained, deployed, strict=True)) != ema
    assert not ema or not algorithm.inference_policy().training
