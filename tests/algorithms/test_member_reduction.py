"""Tests of members that bootstrap from themselves, and of random members, with scalar and distributional critics."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, batch, gaussian, two_modes

from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.algorithms.td3 import TD3, TD3Config
from robopolicy.errors import UserError

FOUR = replace(SMALL, members=4)
AVERAGED: dict[str, dict[str, Any]] = {"sac": {"average_members": True}, "td3": {"value_reduction": "mean"}}


def learner(name: str, **config: Any) -> OffPolicy:
    settings: dict[str, Any] = {"critic": FOUR, "batch_size": 8} | config
    if name == "sac":
        return SAC(SACConfig(**settings), gaussian(), total_updates=10)
    return TD3(TD3Config(**settings), gaussian(), total_updates=10)


@pytest.mark.parametrize("name", AVERAGED)
def test_each_of_four_averaged_members_bootstraps_from_itself(name: str) -> None:
    algorithm, data = learner(name, **AVERAGED[name]), batch(two_modes(8), lambda a: a[:, 0], discount=0.9)
    with torch.no_grad():
        chunk = torch.rand(8, 2, 1)
        torch.testing.assert_close(
            algorithm.bootstrap(data, chunk), data.reward + 0.9 * algorithm.target_critic(data.next_obs, chunk)
        )
    assert torch.tensor(list(algorithm.update(data).values())).isfinite().all()
    with pytest.raises(UserError, match=r"bootstraps from all members, so algorithm\.num_min_qs=1 has no effect"):
        learner(name, num_min_qs=1, **AVERAGED[name])


def test_a_distributional_target_is_the_least_of_the_drawn_members() -> None:
    critic = replace(FOUR, bins=11, histogram="c51", value_min=0.0, value_max=1.0)
    algorithm = learner("td3", critic=critic, num_min_qs=1)
    data = batch(torch.zeros(4, 2, 1), lambda a: 0 * a[:, 0], discount=1.0)  # the target is the drawn distribution
    logits = torch.randn(4, 4, 11)
    targets = torch.cat([algorithm.backup_outputs(data, logits, None) for _ in range(40)])
    drawn = {int((logits.softmax(-1) - target).abs().amax((1, 2)).argmin()) for target in targets}
    assert drawn == {0, 1, 2, 3}
    every = learner("td3", critic=critic, num_min_qs=4).backup_outputs(data, logits, None)
    least = (logits.softmax(-1) * algorithm.critic.histogram.centers).sum(-1).argmin(0)
    torch.testing.assert_close(every[0], logits.softmax(-1)[least, torch.arange(4)])
