"""Tests of group and critic baselines: each recipe against its written formula, and their relations."""

from __future__ import annotations

import pytest
import torch
from baselines_by_hand import gae, groups, left_out, valid
from tabular import Tabular, check_recipe, ppo, recipe_of, rewards, standardised, tabular
from torch import Tensor

CENTRED = ["grpo", "dr_grpo", "rloo", "gpg", "pass_at_k", "reinforce_pp_baseline", "opo", "loop", "lite_ppo"]


def centred(case: Tabular) -> Tensor:
    reward, group = rewards(case), groups(case)
    return reward - torch.stack([reward[group == key].mean() for key in group])


def seq_sum(losses: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, losses, 0.0).sum(1).mean()


def pg(case: Tabular, advantage: Tensor) -> Tensor:
    advantage = advantage.unsqueeze(1) if advantage.dim() == 1 else advantage
    return -advantage * (case.logp() - case.decisions.logp_old)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    kept = values[mask]
    return (values - kept.mean()) / (kept.std() + 1e-6)


FORMULAS = {
    "loop": lambda case: ppo(case, left_out(case))[valid(case)].mean(),
    "retool": lambda case: ppo(case, whitened(gae(case, 1.0, 1.0), valid(case)))[valid(case)].mean(),
    "lite_ppo": lambda case: ppo(case, centred(case) / (rewards(case).std() + 1e-6))[valid(case)].mean(),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_recipe_is_its_formula(name: str) -> None:
    check_recipe(name, FORMULAS[name])


@pytest.mark.parametrize("name", CENTRED)
def test_advantages_ignore_group_constants_and_vanish_for_equal_rewards(name: str) -> None:
    case, mask = tabular(), torch.ones(16, 6, dtype=torch.bool)
    reward = torch.zeros(16, 6, dtype=torch.float64)
    reward[:, 0] = rewards(case) * 0.5
    once = case.decisions.with_fields(reward=reward, mask=mask)
    recipe = recipe_of(name)
    if name not in ("bnpo", "adora", "lite_ppo"):  # these derive successes or deviations from the reward
        shifted = reward.clone()
        shifted[:, 0] += 0.25 * groups(case)
        more = recipe.advantage(once.with_fields(reward=shifted))
        torch.testing.assert_close(more, recipe.advantage(once), atol=1e-6, rtol=1e-6)
    reward[:, 0] = 0.25
    assert recipe.advantage(once.with_fields(reward=reward)).abs().max() < 1e-9


def test_lite_ppo_advantages_equal_grpo_for_one_prompt_per_batch() -> None:
    """With one group the batch deviation equals the group deviation."""
    case = tabular()
    one = case.decisions.select(slice(0, 4))
    lite, grpo = (recipe_of(name).advantage(one) for name in ("lite_ppo", "grpo"))
    torch.testing.assert_close(lite, grpo)


def test_lite_ppo_divides_by_the_deviation_of_rewards_not_of_advantages() -> None:
    """With an easy and a hard prompt, rewards deviate less within a prompt than over the batch."""
    case = tabular(reward=torch.zeros(16, 6, dtype=torch.float64))
    batch = case.decisions.select(torch.tensor([0, 1, 4, 5]))
    reward = torch.zeros(4, 6, dtype=torch.float64)
    reward[:, 0] = torch.tensor([1.0, 2.0, 5.0, 6.0])
    found = recipe_of("lite_ppo").advantage(batch.with_fields(reward=reward))[:, 0]
    deviation = (2 * (2.5**2 + 1.5**2) / 3) ** 0.5  # around 3.5; advantages deviate by (4 * 0.25 / 3) ** 0.5
    torch.testing.assert_close(found * deviation, torch.tensor([-0.5, 0.5, -0.5, 0.5]).double(), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="Scale of must be 'advantage' or 'outcome', got 'reward'"):
        recipe_of("lite_ppo", advantage=[{"name": "scale", "scope": {"partition": "all"}, "of": "reward"}])


def test_masked_gae_is_gae_without_the_masked_columns() -> None:
    case = tabular(group=torch.arange(16))
    recipe = recipe_of("retool", advantage=[])
    full = recipe.advantage(case.decisions)[3]
    keep = case.decisions.valid()[3]
    short = {name: getattr(case.decisions, name)[3:4][:, keep] for name in ("logp_old", "reward", "value", "unit")}
    alone = recipe.advantage(type(case.decisions)(**short))
    torch.testing.assert_close(full[keep], alone[0])
    assert not bool(keep[1]) and bool(keep[2])  # a tool token is in the middle


def test_loop_with_deviation_scaling_equals_grpo_advantages() -> None:
    scale = {"name": "scale", "scope": {"partition": "group", "reduce_over": "trajectory"}}
    case = tabular()
    loop = recipe_of("loop", advantage=[*recipe_of("loop").plain["advantage"], scale])
    found = loop.advantage(case.decisions)
    torch.testing.assert_close(found[:, 0], standardised(rewards(case), groups(case)), atol=1e-5, rtol=1e-5)


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
        (expected,) = torch.autograd.grad(loss, case.logits)
        torch.testing.assert_close(found, expected)
