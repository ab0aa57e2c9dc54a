"""Tests of fitted Q-evaluation with known numbers: the value per member and the interval from their spread."""

import numpy as np
import pytest
import torch

from robopolicy.critics.q import CriticConfig
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.evaluation.ope import FQE, FQEConfig, Logs
from robopolicy.spec import PolicySpec


def coin(rewards: tuple[float, ...]) -> Logs:
    """Episodes of one step from the same state that differ only in their reward."""
    episodes = [
        Episode(
            {
                "state": np.zeros((1, 1), np.float32),
                "action": np.zeros((1, 1), np.float32),
                "reward": np.array([reward], np.float32),
                "terminated": np.ones(1, np.bool_),
            }
        )
        for reward in rewards
    ]
    return Logs(Episodes.from_list(episodes, 0.1), PolicySpec({"state": (1,)}, 1), 0.9)


def fitted(logs: Logs, steps: int) -> FQE:
    critic = CriticConfig(members=6, hidden=(8,), activation="relu")
    config = FQEConfig(critic, steps=steps, batch_size=32, tau=0.2, learning_rate=0.05)
    return FQE(config, logs, torch.zeros(1, len(logs.episodes), 1, 1))


def test_every_member_learns_the_mean_of_its_own_resample() -> None:
    logs = coin((0.0, 0.0, 1.0))
    fqe = fitted(logs, 80)
    shares = fqe._counts[:, 2] / 3  # share of the rewarded episode in the resample of each member
    assert len(set(shares)) > 1
    np.testing.assert_allclose(fqe.q()[:, 0], shares, atol=0.08)


def test_interval_is_the_normal_interval_of_the_members() -> None:
    fqe = fitted(coin((0.0, 0.0, 1.0)), 20)
    wide, narrow = fqe.interval(0.95), fqe.interval(0.5)
    members = fqe.v(fqe.logs.episodes.starts)[:, 0]  # every episode starts in the same state
    assert wide.estimate == narrow.estimate == pytest.approx(members.mean())
    assert wide.high - wide.estimate == pytest.approx(1.95996 * members.std(ddof=1), rel=1e-4)
    assert narrow.high - narrow.estimate == pytest.approx(0.67449 * members.std(ddof=1), rel=1e-4)
