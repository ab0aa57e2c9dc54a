"""What an actor makes of noise in the rewards of a memory: values that are too high, the less so the more pessimism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_bandit import batch
from lock import rows
from test_gaussian_critics import GAMMA, learner

HIDDEN_STATE, NOISE = 128, 4.0


def bias(name: str, seed: int, **settings: Any) -> float:
    """Mean value of the policy's own actions, all worth 0, after 100 updates on the same noisy rewards."""
    algorithm = learner(name, seed, temperature=1e-6, temperature_lr=0.0, **settings)
    torch.manual_seed(seed)
    noise = NOISE * torch.randn(HIDDEN_STATE)
    noise = noise - noise.mean()  # a lucky memory is no bias
    memory = batch(torch.rand(HIDDEN_STATE, 2, 1) * 2 - 1, lambda action: noise, discount=GAMMA)
    for _ in range(100):
        algorithm.update(rows(memory, torch.randperm(HIDDEN_STATE)))
    with torch.no_grad():
        return float(algorithm.critic.min_q(memory.obs, algorithm.policy.mode(memory.obs)).mean())


@pytest.mark.parametrize("seed", range(2))
def test_stac_takes_less_noise_of_rewards_for_value_than_sac_and_than_itself_without_pessimism(seed: int) -> None:
    twins, plain, wary = bias("sac", seed), bias("stac", seed, members=1, pessimism=0.0), bias("stac", seed, members=1)
    assert min(twins, plain) > 0.5
    assert wary < min(twins, plain) - 1 and abs(wary) < twins
