"""Tests of ratio recipes against their written formulas and simpler limits."""

from __future__ import annotations

import pytest
import torch
from formulas import DISTANCES, by_row, gradients, relative, tok, z
from tabular import Tabular, check, check_recipe, ppo, recipe_of, rewards, tabular
from torch import Tensor

from robopolicy.contrib.text_catalogue.bounds import relative_entropy


def test_gppo_loss_equals_dual_clip_ppo_and_keeps_the_clipped_gradient() -> None:
    case, recipe = tabular(drift=0.6), recipe_of("gppo")
    a, ratio = relative(case)[:, None], z(case).exp()
    loss, info = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    plain = torch.where(a < 0, torch.minimum(ppo(case, relative(case)), -3 * a), ppo(case, relative(case)))
    torch.testing.assert_close(loss, tok(plain, case))
    beyond = torch.where(a < 0, ratio < 0.8, ratio > 1.2) & (a != 0)
    assert int((beyond & case.decisions.valid()).sum()) > 2 and info["clip_fraction"] > 0
    slope = torch.where(beyond, torch.where(a < 0, 0.8, 1.2), ratio).detach()
    slope = slope.masked_fill((a < 0) & (ratio > 3.0), 0.0)
    (found,) = torch.autograd.grad(loss, case.logits, retain_graph=True)
    (expected,) = torch.autograd.grad(tok(-a * slope * z(case), case), case.logits)
    torch.testing.assert_close(found, expected)


def test_dcpo_clip_bounds_depend_on_the_old_probability() -> None:
    def formula(case: Tabular) -> Tensor:
        q = case.decisions.logp_old.exp()
        low = 0.5 + 0.5 * (1 - 4 * 0.16 / q).clamp(min=0).sqrt()
        high = (0.5 + 0.5 * (1 + 4 * 0.2 / q).sqrt()).clamp(max=10.0)
        ratio, a = z(case).exp(), relative(case)[:, None]
        return by_row(-torch.minimum(ratio * a, torch.minimum(torch.maximum(ratio, low), high) * a), case)

    check_recipe("dynamic_clipping", formula, drift=0.8)  # the first visit of every prompt is GRPO


def test_fiberpo_matches_its_written_formula() -> None:
    def roll(x: Tensor, budget: float, length: int) -> Tensor:
        return torch.where(x <= budget, x, ((length + 1) * budget - length * x).clamp(min=0.0))

    def formula(case: Tabular) -> Tensor:
        a, mask, rows = relative(case), case.decisions.valid(), []
        for row in range(len(a)):
            own = z(case)[row][mask[row]]
            up, down = own.clamp(min=0).mean(), (-own).clamp(min=0).mean()
            base = roll(up, 0.2, len(own)) - roll(down, 0.1, len(own))
            sign = torch.where(own >= 0, 1.0, -1.0)
            same, other = torch.where(own >= 0, up, down), torch.where(own >= 0, down, up)
            residual = (sign * (sign * own - same)).clamp(-0.02, 0.02) - (-sign * other).clamp(-0.02, 0.02)
            rows.append((-a[row] * (base + residual).exp()).mean())
        return torch.stack(rows).mean()

    check_recipe("fiberpo", formula)


def test_fiberpo_within_its_budgets_equals_the_unclipped_ratio_loss() -> None:
    case = tabular(drift=0.001)
    plain = {"surrogate": "importance_sampling", "aggregate": "sequence_mean"}
    torch.testing.assert_close(gradients("fiberpo", case), gradients("grpo", case, estimator=plain))


def test_r2vpo_matches_its_formula_and_updates_its_multiplier() -> None:
    check_recipe("r2vpo", lambda c: tok(-relative(c)[:, None] * z(c).exp() + (z(c).exp() - 1) ** 2, c))
    case, recipe = tabular(), recipe_of("r2vpo")
    _, info = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    recipe.observe(case.decisions, info)
    rollout_metrics = ((z(case).exp() - 1) ** 2)[case.decisions.valid()].mean().item()
    assert recipe.estimator.controllers["ratio_variance"].value == pytest.approx(1.0 + 10.0 * (rollout_metrics - 0.04))


def test_r2vpo_multiplier_can_increase_from_zero() -> None:
    free = {"ratio_variance": {"name": "dual", "value": 0.0, "target": 0.01, "rate": 10.0}}
    case, recipe = tabular(), recipe_of("r2vpo", controllers=free)
    _, info = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    recipe.observe(case.decisions, info)
    assert recipe.estimator.controllers["ratio_variance"].value > 0


def disco(case: Tabular, score: str, tau: float | None) -> Tensor:
    mask, value, group = case.decisions.valid(), rewards(case), case.decisions.require("group")
    per = case.logp() if score == "logp" else z(case).exp()
    s = torch.stack([row[keep].mean() for row, keep in zip(per, mask, strict=True)])
    terms = []
    for key in group.unique():
        good, bad = s[(group == key) & (value > 0)], s[(group == key) & (value == 0)]
        if len(good) and len(bad):
            terms.append(good.mean() - (bad.mean() if tau is None else tau * ((bad / tau).exp().mean()).log()))
    divergence = -z(case)[mask].mean()
    return -torch.stack(terms).mean() + (1000 * (divergence - 1e-4)).clamp(min=0).detach() * divergence


@pytest.mark.parametrize(("name", "score", "tau"), [("disco", "logp", 1.0), ("disco_b", "logp", None)])
@pytest.mark.parametrize("distance", DISTANCES)
def test_disco_matches_its_formula_for_both_score_functions(
    name: str, score: str, tau: float | None, distance: float
) -> None:
    check(recipe_of(name, select=[]), tabular(drift=distance), lambda c: disco(c, score, tau))
    ratios = {"name": "discriminative", "score": "ratio", "temperature": tau}
    check(recipe_of(name, select=[], objective=ratios), tabular(drift=distance), lambda c: disco(c, "ratio", tau))


def test_disco_basic_form_equals_a_policy_gradient_and_the_hot_limit() -> None:
    """The basic form is a policy gradient with (R - p) / (p (1 - p)) and the limit of a high temperature; there is no
    penalty within the KL limit."""
    case = tabular(drift=0.0)
    value, group = rewards(case), case.decisions.require("group")
    p = torch.stack([value[group == key].mean() for key in group])
    mixed = (p > 0) & (p < 1)
    a = torch.where(mixed, (value - p) / (p * (1 - p)).clamp(min=1e-9), 0.0)
    means = torch.stack([row[keep].mean() for row, keep in zip(case.logp(), case.decisions.valid(), strict=True)])
    size = (group == 0).sum()
    (expected,) = torch.autograd.grad(-(a * means).sum() / size / group[mixed].unique().numel(), case.logits)
    basic = gradients("disco_b", case)
    torch.testing.assert_close(basic, expected)
    hot = {"name": "discriminative", "score": "logp", "temperature": 1e6}
    torch.testing.assert_close(gradients("disco", case, objective=hot), basic, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_disco_has_zero_gradient_on_groups_with_equal_rewards(outcome: float) -> None:
    """Groups with only failures or only successes have a zero, finite gradient."""
    case = tabular()
    reward = case.decisions.require("reward").clone()
    reward[8:] = 0.0
    reward[8:, 0] = outcome
    agreed = Tabular(case.decisions.with_fields(reward=reward), case.tokens, case.logits)
    gradient = gradients("disco", agreed, regularizers=[])
    assert bool(gradient.isfinite().all()) and bool((gradient[2:] == 0).all()) and bool((gradient[0] != 0).any())


def test_hapo_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        d, mask = case.decisions, case.decisions.valid()
        level = d.require("entropy").clamp(min=1e-6).log()
        offset = level - torch.quantile(level[mask], 0.8)
        h = torch.where(offset > 0, offset / offset[mask].max(), -offset / offset[mask].min())
        value, group = rewards(case)[:, None].expand_as(level), d.require("group")
        a = torch.zeros_like(level)
        for key in group.unique():
            rows = (group == key)[:, None] & mask
            a[rows] = (value[rows] - value[rows].mean()) / (value[rows].std() + 1e-6)
        ratio = z(case).exp()
        low, high = 1 - 0.2 * (1 - h.clamp(max=0)), 1 + 0.2 * (1 + h.clamp(min=0))
        inner = (ratio > (1 + low) / 2) & (ratio < (1 + high) / 2)
        a = a * torch.where((h > 0) & ~inner | (h <= 0) & inner, 1 + h, 1.0)
        clipped = -torch.minimum(ratio * a, torch.minimum(torch.maximum(ratio, low), high) * a)
        return tok(torch.where(a < 0, torch.minimum(clipped, -3 * a), clipped), case)

    for distance in DISTANCES:
        check(recipe_of("hapo", select=[]), tabular(drift=distance), formula)


def test_hapo_with_equal_entropies_equals_token_level_dapo() -> None:
    case = tabular(entropy=torch.full((16, 6), 0.7, dtype=torch.float64))
    assert bool((relative_entropy(case.decisions) == 0).all())
    stages = recipe_of("hapo").plain["advantage"]
    torch.testing.assert_close(
        gradients("hapo", case), gradients("grpo", case, advantage=stages, estimator={"aggregate": "token_mean"})
    )


def test_bupo_scored_by_the_last_layer_equals_grpo() -> None:
    case = tabular()
    assert torch.equal(gradients("bupo", case), gradients("grpo", case))
    assert recipe_of("bupo").rollout["layer"]["updates"] == 30


def test_minirl_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        weight = (d.logp_old - d.require("logp_behaviour")).exp().clamp(max=2.0)
        return (ppo(case, relative(case, scaled=False)) * weight).masked_fill(~d.valid(), 0.0).sum(1).mean()

    check_recipe("minirl", formula)


def test_minirl_on_policy_without_behaviour_mismatch_equals_reinforce() -> None:
    case = tabular(drift=0.0)
    same = Tabular(case.decisions.with_fields(logp_behaviour=case.decisions.logp_old), case.tokens, case.logits)
    a = relative(case, scaled=False)[:, None]
    plain = -(a * case.logp()).masked_fill(~case.decisions.valid(), 0.0).sum(1).mean()
    (expected,) = torch.autograd.grad(plain, case.logits)
    torch.testing.assert_close(gradients("minirl", same), expected)
