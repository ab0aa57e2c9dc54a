"""Targets of the mean minus rho standard deviations, computed by hand as in ColinQiyangLi/qam."""

from __future__ import annotations

from typing import Any

import chunking_learners
import pytest
import torch
import value_learners
from chunk_bandit import Known, batch, two_modes
from test_dsrl import LINEAR, bandit, linear, make

from robopolicy.algorithms.dsrl_na import DSRLNA
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.critics.q import pessimistic_mean
from robopolicy.errors import UserError
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.black_box import CallablePolicy

THREE = (lambda s, a: 1.0 + 0 * s[:, 0], lambda s, a: 2.0 + 0 * s[:, 0], lambda s, a: 6.0 + 0 * s[:, 0])
MEAN, STD = 3.0, (14 / 3) ** 0.5  # of 1, 2 and 6, over three members


def test_standard_deviation_is_over_all_members() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    torch.testing.assert_close(pessimistic_mean(values, 0.5), torch.tensor([1.5, 3.0]))
    torch.testing.assert_close(pessimistic_mean(values, 0.0), torch.tensor([2.0, 4.0]))


@pytest.mark.parametrize(("rho", "expected"), [(None, MEAN), (0.0, MEAN), (0.5, MEAN - 0.5 * STD)])
@pytest.mark.parametrize("name", ["fql", "qc"])
def test_chunking_targets_bootstrap_from_the_pessimistic_mean(name: str, rho: float | None, expected: float) -> None:
    learner: Any = chunking_learners.MAKERS[name](rho=rho)
    learner.target_critic = Known(*THREE)
    data = batch(two_modes(8), lambda a: a[:, 0], discount=0.9)
    torch.testing.assert_close(learner.target(data), data.reward + 0.9 * expected)


@pytest.mark.parametrize(("rho", "expected"), [(None, 1.0), (0.5, MEAN - 0.5 * STD), (1.0, MEAN - STD)])
@pytest.mark.parametrize("name", ["iql", "idql"])
def test_implicit_values_regress_on_the_pessimistic_mean(name: str, rho: float | None, expected: float) -> None:
    learner: Any = value_learners.MAKERS[name](rho=rho, num_min_qs=3)
    learner.target_critic = Known(*THREE)
    data = batch(two_modes(8), lambda a: a[:, 0])
    torch.testing.assert_close(learner.q_values(data), torch.full((8,), expected))


def test_steering_bootstraps_from_the_pessimistic_mean() -> None:
    learner = make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR), rho=0.5)
    learner.target_critic = Known(*THREE)
    data = bandit(8, 0)
    data.discount.fill_(0.9)
    torch.testing.assert_close(learner.target(data), data.reward + 0.9 * (MEAN - 0.5 * STD))


def test_rho_is_refused_where_it_would_have_no_effect() -> None:
    policy = GaussianPolicy(GaussianConfig(squash=True, action_normalization="minmax"), LINEAR)
    with pytest.raises(UserError, match="'sac' has no pessimistic mean"):
        SAC(SACConfig(rho=0.5), policy, total_updates=1)
