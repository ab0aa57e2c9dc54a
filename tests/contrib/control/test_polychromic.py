"""Tests of polychromic PPO: hand-computed sets, an unbiased gradient, windows, and a bandit with several good arms."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor

from robopolicy.contrib.control.polychromic import Polychromic, PolychromicConfig, visited_sets
from robopolicy.contrib.control.positions import PositionConfig
from robopolicy.contrib.control.stages import set_advantage, set_values
from robopolicy.contrib.control.vine_rollout import VineSampler
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

SMALL: dict[str, Any] = {
    "num_steps": 10,
    "epochs": 2,
    "batch_size": 64,
    "branch_points": 2,
    "branches": 4,
    "set_size": 2,
    "window": 3,
}


def learner(seed: int = 0, **config: Any) -> Polychromic:
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,)), PolicySpec({"state": (6,)}, 2))
    return Polychromic(PolychromicConfig(**(SMALL | config)), policy, total_updates=20)


def sampler_for(algorithm: Polychromic) -> VineSampler:
    config = algorithm.config
    return VineSampler(
        tools.chunked(algorithm, 3),
        decisions=config.num_steps,
        branch_points=config.branch_points,
        branches=config.branches,
    )


def test_set_value_equals_mean_return_times_share_of_distinct_ways() -> None:
    returns, ways = torch.tensor([[1.0, 0.5, 0.0, 1.0]]), torch.tensor([[7, 7, 2, 3]])
    subsets = torch.tensor([[0, 1], [0, 2], [2, 3], [0, 3]])
    assert set_values(returns, ways, subsets).tolist() == [[0.0, 0.5, 0.5, 1.0]]
    triples = torch.tensor([[0, 1, 2], [0, 2, 3]])
    torch.testing.assert_close(set_values(returns, ways, triples), torch.tensor([[0.5 * 2 / 3, 2 / 3 * 1.0]]))
    same = torch.zeros(1, 4).long()
    assert not bool(set_advantage(returns, same, 2).any())  # identical ways have no advantage at any return


def test_set_advantage_gradient_equals_the_expected_set_value_gradient() -> None:
    """Enumerates all samples of three vines from a policy over three arms; sets have two members."""
    worth = torch.tensor([0.9, 0.6, 0.1], dtype=torch.float64)
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    pair = torch.tensor([[0, 1]])
    log_policy = logits.log_softmax(0)
    exact = sum(
        (log_policy[list(arms)].sum().exp() * set_values(worth[list(arms)][None], torch.tensor([arms]), pair)[0, 0])
        for arms in product(range(3), repeat=2)
    )
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)  # type: ignore[arg-type]
    estimate = torch.zeros(())
    for arms in product(range(3), repeat=3):
        index = list(arms)
        advantage = set_advantage(worth[index][None], torch.tensor([arms]), 2)[0]
        probability = log_policy[index].sum().exp().detach()
        estimate = estimate + probability * (advantage * log_policy[index]).mean() * 2  # members
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], expected)


def test_ways_are_sets_of_visited_cells() -> None:
    one = torch.tensor([[[0.2], [5.0]], [[1.5], [6.0]], [[0.7], [9.0]]])  # (3, 2, 1): cells {0, 1} and {5, 6, 9}
    other = torch.tensor([[[1.1], [5.5]], [[0.3], [6.5]]])  # {0, 1} and {5, 6}
    valid = [torch.tensor([[True, True], [True, True], [True, False]]), torch.ones(2, 2, dtype=torch.bool)]
    ways = visited_sets([one, other], valid)
    assert ways[0, 0] == ways[1, 0] and ways[0, 1] == ways[1, 1] and ways[0, 0] != ways[0, 1]
    valid[0][2, 1] = True
    assert len(visited_sets([one, other], valid)[:, 1].unique()) == 2


def entropy_and_worst(polychromic: bool, seed: int) -> tuple[float, float, float]:
    """Entropy, lowest good-arm probability and success on a bandit with three nearly equal good arms of five."""
    generator = torch.Generator().manual_seed(seed)
    worth, logits = torch.tensor([1.0, 0.98, 0.96, 0.0, 0.0]), torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    for _ in range(400):
        policy = logits.softmax(0)
        arms = torch.multinomial(policy.detach().expand(8, 5), 6, replacement=True, generator=generator)
        returns = worth[arms]
        advantage = set_advantage(returns, arms, 3) if polychromic else returns - returns.mean(1, keepdim=True)
        optimizer.zero_grad()
        (-(advantage * policy.log()[arms]).mean()).backward()
        optimizer.step()
    policy = logits.detach().softmax(0)
    return -float((policy * policy.log()).sum()), float(policy[:3].min()), float(policy[:3].sum())


@pytest.mark.parametrize("seed", range(3))
def test_polychromic_keeps_all_good_arms_where_policy_gradient_keeps_one(seed: int) -> None:
    entropy, worst, success = entropy_and_worst(True, seed)
    narrow, plain, _ = entropy_and_worst(False, seed)
    assert entropy > math.log(3) and worst == pytest.approx(0.3, abs=0.03) and success > 0.97
    assert narrow < 0.25 and plain < 0.02


def test_windows_use_set_advantages_and_all_other_steps_use_gae() -> None:
    algorithm = learner()
    batch = sampler_for(algorithm).collect(algorithm.act)
    rows = algorithm.process_rollout(batch)
    num_valid = sum(int(vine.valid.sum()) for vine in batch.branches)
    assert len(rows) == 30 + num_valid
    _, info = algorithm.loss(rows, log_stats=True)
    assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-9)
    shared = algorithm.advantages(batch.branches)
    unit = float(shared.square().mean().sqrt())
    first = int(batch.branches[0].valid.sum())
    own = torch.full((len(batch.branches[0].valid), 3), torch.nan)
    own[batch.branches[0].valid] = rows.advantage[30 : 30 + first]
    torch.testing.assert_close(own[:3], (shared[0] / unit).expand(3, 3))
    early = [torch.arange(len(vine.valid))[:, None].expand(vine.shape)[vine.valid] < 3 for vine in batch.branches]
    rest = rows.advantage[~torch.cat([torch.zeros(30, dtype=torch.bool), *early])]
    assert float(rest.mean()) == pytest.approx(0, abs=1e-5) and float(rest.std()) == pytest.approx(1, abs=1e-5)


def test_kl_coef_penalises_divergence_from_the_rollout_policy() -> None:
    free, bound = learner(kl_coef=0.0), learner(kl_coef=0.5)
    rows = free.process_rollout(sampler_for(free).collect(free.act))
    rows = replace(rows, logp=rows.logp - 0.3)  # all ratios are exp(0.3)
    losses = [algorithm.loss(rows, log_stats=False)[0] for algorithm in (free, bound)]
    assert float((losses[1] - losses[0]).detach()) == pytest.approx(0.5 * (math.exp(0.3) - 1 - 0.3), rel=1e-4)
    slopes = [
        tools.gradient(loss, list(algorithm.policy.parameters()))
        for loss, algorithm in zip(losses, (free, bound), strict=True)
    ]
    logp = free.policy.decisions(rows.obs, rows.record).logp.mean()
    back = tools.gradient(0.5 * (math.exp(0.3) - 1) * logp, list(free.policy.parameters()))
    tools.assert_close([b - a for a, b in zip(*slopes, strict=True)], back)


def test_advantages_are_assigned_to_their_vines() -> None:
    algorithm = learner(branches=3)
    batch = sampler_for(algorithm).collect(algorithm.act)
    found = algorithm.advantages(batch.branches)
    for fork, env in product(range(2), range(3)):
        branches = batch.branches[3 * fork : 3 * fork + 3]
        assert {int(vine.group[env]) for vine in branches} == {3 * fork + env}
        returns = torch.stack([vine.returns[env] for vine in branches])[None]
        places = [algorithm.config.place.extract(vine.obs)[:, env : env + 1] for vine in branches]
        ways = visited_sets(places, [vine.valid[:, env : env + 1] for vine in branches]).T
        expected: Tensor = set_advantage(returns, ways, 2)[0]
        torch.testing.assert_close(found[3 * fork : 3 * fork + 3, env], expected)


def test_settings_without_valid_sets_are_refused() -> None:
    settings: list[dict[str, Any]] = [
        {"set_size": 4},
        {"set_size": 1},
        {"branches": 40, "set_size": 20},
        {"branch_points": 11},
    ]
    for wrong in [*settings, {"window": 0}]:
        with pytest.raises(UserError):
            PolychromicConfig(**(SMALL | wrong))
    with pytest.raises(UserError, match=r"place\.key"):
        learner(place=PositionConfig(key="pose"))
