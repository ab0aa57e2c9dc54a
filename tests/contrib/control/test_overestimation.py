"""Test of overestimation from reward noise in a fixed batch: pessimism reduces it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_bandit import batch
from lock import rows
from test_gaussian_critics import GAMMA, learner

ROWS, NOISE = 128, 4.0


def bias(name: str, seed: int, **settings: Any) -> float:
    """Mean value of the policy's actions, whose true value is 0, after 100 updates on the same noisy rewards."""
    algorithm = learner(name, seed, temperature=1e-6, temperature_lr=0.0, **settings)
    torch.manual_seed(seed)
    noise = NOISE * torch.randn(ROWS)
    noise = noise - noise.mean()  # zero mean, so all true values are 0
    data = batch(torch.rand(ROWS, 2, 1) * 2 - 1, lambda action: noise, discount=GAMMA)
    for _ in range(100):
        algorithm.update(rows(data, torch.randperm(ROWS)))
    with torch.no_grad():
        return float(algorithm.critic.min_q(data.obs, algorithm.policy.mode(data.obs)).mean())


@pytest.mark.parametrize("seed", range(2))
def test_stac_overestimates_less_than_sac_and_stac_without_pessimism(seed: int) -> None:
    sac, plain, pessimistic = (
        bias("sac", seed),
        bias("stac", seed, members=1, pessimism=0.0),
        bias("stac", seed, members=1),
    )
    assert min(sac, plain) > 0.5
    assert pessimistic < min(sac, plain) - 1 and abs(pessimistic) < sac
