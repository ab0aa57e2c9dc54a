"""Group and critic baselines: each recipe compared with its written formula, and relations between recipes."""

import pytest
import torch
from baselines_by_hand import gae, groups, left_out, to_go, valid
from tabular import Tabular, check_recipe, ppo, recipe_of, rewards, seq_mean, tabular
from torch import Tensor

CENTRED = ["grpo", "dr_grpo", "rloo", "gpg", "pass_at_k", "reinforce_pp_baseline", "opo"]


def centred(case: Tabular) -> Tensor:
    reward, group = rewards(case), groups(case)
    return reward - torch.stack([reward[group == key].mean() for key in group])


def seq_sum(losses: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, losses, 0.0).sum(1).mean()


def pg(case: Tabular, advantage: Tensor) -> Tensor:
    advantage = advantage.unsqueeze(1) if advantage.dim() == 1 else advantage
    return -advantage * (case.logp() - case.decisions.logp_old)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    selected = values[mask]
    return (values - selected.mean()) / (selected.std() + 1e-6)


FORMULAS = {
    "reinforce": lambda case: seq_sum(pg(case, rewards(case)), valid(case)),
    "rloo": lambda case: seq_sum(pg(case, left_out(case)), valid(case)),
    "dr_grpo": lambda case: seq_sum(ppo(case, centred(case)), valid(case)) / 100.0,
    "reinforce_pp": lambda case: ppo(case, whitened(to_go(case), valid(case)))[valid(case)].mean(),
    "reinforce_pp_baseline": lambda case: ppo(
        case, whitened(centred(case).unsqueeze(1).expand_as(valid(case)), valid(case))
    )[valid(case)].mean(),
    "remax": lambda case: seq_sum(pg(case, rewards(case) - case.decisions.extra["greedy"]), valid(case)),
    "ppo": lambda case: ppo(case, whitened(gae(case, 1.0, 0.95), valid(case)))[valid(case)].mean(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_recipe_loss_and_gradient_equal_the_written_formula(name: str) -> None:
    check_recipe(name, FORMULAS[name])


def test_opo_weighs_rewards_by_length() -> None:
    def formula(case: Tabular) -> Tensor:
        reward, length = rewards(case), valid(case).sum(1)
        baseline = torch.stack(
            [(reward * length)[groups(case) == key].sum() / length[groups(case) == key].sum() for key in groups(case)]
        )
        return seq_sum(pg(case, reward - baseline), valid(case))

    check_recipe("opo", formula)


def test_gpg_divides_by_the_share_of_nonzero_advantages() -> None:
    def formula(case: Tabular) -> Tensor:
        advantage = centred(case)
        share = (advantage != 0).double().mean()
        return pg(case, advantage / share)[valid(case)].mean()

    check_recipe("gpg", formula)
    assert (centred(tabular()) == 0).any()  # otherwise the share is 1 and the test checks nothing


def test_pass_at_k_rewards_only_the_best_rollout() -> None:
    reward = torch.zeros(16, 6, dtype=torch.float64)
    reward[:, 0] = torch.tensor([3.0, 1, 2, 0, 5, 5, 1, 0, 1, 1, 1, 1, 0, 0, 4, 1])
    case = tabular(reward=reward, mask=torch.ones(16, 6, dtype=torch.bool))
    advantage = recipe_of("pass_at_k").advantage(case.decisions).flatten()
    std = torch.tensor([3.0, 1, 2, 0]).std(), torch.tensor([0.0, 0, 4, 1]).std()
    expected = torch.zeros(16, dtype=torch.float64)
    expected[0], expected[14] = 1.0 / std[0], 3.0 / std[1]
    torch.testing.assert_close(advantage, expected, atol=1e-5, rtol=1e-5)


def test_the_optimal_token_baseline_is_a_weighted_mean_of_the_returns_at_a_position() -> None:
    def formula(case: Tabular) -> Tensor:
        d, mask = case.decisions, valid(case)
        weight = torch.cumsum((1.0 - 2.0 * d.logp_old.exp() + d.extra["collision"]).clamp(min=0.0) * mask, 1) * mask
        returns, advantage = to_go(case), torch.zeros_like(weight)
        for key in groups(case).unique():
            rows = groups(case) == key
            total = weight[rows].sum(0)
            advantage[rows] = returns[rows] - (returns * weight)[rows].sum(0) / torch.where(total > 0, total, 1.0)
        return ppo(case, advantage)[mask].mean()

    check_recipe("optimal_token_baseline", formula)


@pytest.mark.parametrize("name", CENTRED)
def test_group_constants_and_equal_rewards_give_no_advantage(name: str) -> None:
    case, mask = tabular(), torch.ones(16, 6, dtype=torch.bool)
    reward = torch.zeros(16, 6, dtype=torch.float64)
    reward[:, 0] = rewards(case) * 0.5
    once = case.decisions.with_fields(reward=reward, mask=mask)
    recipe = recipe_of(name)
    shifted = reward.clone()
    shifted[:, 0] += 0.25 * groups(case)
    more = recipe.advantage(once.with_fields(reward=shifted))
    torch.testing.assert_close(more, recipe.advantage(once), atol=1e-6, rtol=1e-6)
    reward[:, 0] = 0.25
    assert recipe.advantage(once.with_fields(reward=reward)).abs().max() < 1e-9


def test_leave_one_out_is_dr_grpo_times_g_over_g_minus_one() -> None:
    case = tabular()
    loo, centre = (recipe_of(name).advantage(case.decisions) for name in ("rloo", "dr_grpo"))
    torch.testing.assert_close(loo, 4.0 / 3.0 * centre)


def test_every_baseline_is_the_policy_gradient_at_ratio_one() -> None:
    case = tabular(drift=0.0)
    for name in FORMULAS:
        recipe = recipe_of(name)
        advantage = recipe.advantage(case.decisions)
        loss, _ = recipe.loss(case.decisions, advantage, case.logp())
        (found,) = torch.autograd.grad(loss, case.logits)
        plain = recipe_of(
            name, estimator={**recipe.plain["estimator"], "surrogate": "policy_gradient", "bounds": "constant"}
        )
        loss, _ = plain.loss(case.decisions, advantage, case.logp())
        (wanted,) = torch.autograd.grad(loss, case.logits)
        torch.testing.assert_close(found, wanted)


def test_seq_mean_helper_equals_the_aggregation() -> None:
    case = tabular()
    loss, _ = recipe_of("grpo", estimator={"surrogate": "importance_sampling", "aggregate": "sequence_mean"}).loss(
        case.decisions, torch.ones(16, 1), case.logp()
    )
    torch.testing.assert_close(loss, seq_mean(-(case.logp() - case.decisions.logp_old).exp(), valid(case)))
