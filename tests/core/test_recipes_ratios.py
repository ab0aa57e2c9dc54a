"""Recipes of section 2 against their written formulas, and the limits in which they are something simpler."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import DISTANCES, by_row, gradients, relative, tok, z
from tabular import Tabular, check, check_recipe, ppo, recipe_of, rewards, tabular
from torch import Tensor

from robopolicy.contrib.text_catalogue.bounds import relative_entropy


def test_gspo() -> None:
    def formula(case: Tabular) -> Tensor:
        mask, a = case.decisions.valid(), relative(case)
        rows = []
        for row in range(len(a)):
            ratio = z(case)[row][mask[row]].mean().exp()
            rows.append(-torch.minimum(ratio * a[row], ratio.clamp(1 - 3e-4, 1 + 4e-4) * a[row]))
        return torch.stack(rows).mean()

    check_recipe("gspo", formula)


def gmpo(case: Tabular, low: float, high: float) -> Tensor:
    mask, a = case.decisions.valid(), relative(case)
    rows = []
    for row in range(len(a)):
        change = z(case)[row][mask[row]]
        change = change.clamp(max=high) if a[row] >= 0 else change.clamp(min=-low)
        rows.append(-a[row] * change.mean().exp())
    return torch.stack(rows).mean()


def test_gmpo() -> None:
    check_recipe("gmpo", lambda case: gmpo(case, 0.4, 0.4), drift=0.8)


def test_gmpo_is_grpo_at_first_and_without_bounds_a_mean_ratio_of_sequences() -> None:
    fresh = tabular(drift=0.0)
    torch.testing.assert_close(gradients("gmpo", fresh), gradients("grpo", fresh))
    wide = {"name": "geometric_mean", "low": 50.0, "high": 50.0}
    unclipped = {"level": "sequence", "reduction": "mean", "surrogate": "is", "aggregate": "seq_mean"}
    far = tabular(drift=0.8)
    torch.testing.assert_close(gradients("gmpo", far, objective=wide), gradients("gspo", far, estimator=unclipped))


def test_dapo() -> None:
    for distance in DISTANCES:
        check(recipe_of("dapo", select=[]), tabular(drift=distance), lambda c: tok(ppo(c, relative(c), 0.2, 0.28), c))


def test_dynamic_sampling_changes_only_the_denominator() -> None:
    """Groups that agree have no advantage, so that without them the sum of the losses is the same."""
    case, recipe = tabular(), recipe_of("dapo")
    rows = recipe.select(case.decisions)
    value, group = rewards(case), case.decisions.need("group")
    assert rows.tolist() == [i for i in range(len(value)) if value[group == group[i]].unique().numel() > 1]
    kept = case.decisions.select(rows)
    part, _ = recipe.loss(kept, recipe.advantage(kept), case.logp()[rows])
    whole, _ = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    torch.testing.assert_close(part * kept.valid().sum(), whole * case.decisions.valid().sum())


def test_cispo_gradient_is_that_of_a_policy_gradient_weighted_by_the_clamped_ratio() -> None:
    check_recipe(
        "cispo", lambda c: tok(-relative(c)[:, None] * z(c).detach().exp().clamp(0.0, 1.28) * z(c), c), drift=0.8
    )


def test_sapo() -> None:
    def formula(case: Tabular) -> Tensor:
        a = relative(case)[:, None]
        tau = torch.where(a < 0, 1.05, 1.0)
        return by_row(-a * 4 / tau * torch.sigmoid(tau * (z(case).exp() - 1)), case)

    check_recipe("sapo", formula)


def covariances(case: Tabular) -> Tensor:
    mask, logp = case.decisions.valid(), case.logp().detach()
    a = relative(case)[:, None].expand_as(logp)
    return ((logp - logp[mask].mean()) * (a - a[mask].mean())).masked_fill(~mask, -torch.inf)


def test_clip_cov_silences_the_candidates() -> None:
    """With a share that takes every candidate the random choice is none."""
    weights = [{"name": "clip_covariance", "share": 1.0, "least": 0.3, "most": 2.0}]
    config = {"bounds": {"name": "constant", "low": 0.2}, "weights": weights}

    def formula(case: Tabular) -> Tensor:
        a, ratio, cov = relative(case)[:, None], z(case).exp(), covariances(case)
        free = torch.where(a < 0, ratio >= 0.8, ratio <= 1.2)
        candidate = (cov > 0.3) & (cov < 2.0) & free
        assert 0 < int(candidate.sum()) < int(case.decisions.valid().sum())
        return tok(ppo(case, relative(case)).masked_fill(candidate, 0.0), case)

    for distance in DISTANCES:
        check(recipe_of("clip_cov", estimator=config), tabular(drift=distance), formula)


def test_clip_cov_with_a_share_of_zero_is_ppo_and_draws_as_many_as_it_says() -> None:
    case = tabular()
    silent = {"weights": [{"name": "clip_covariance", "share": 0.0}]}
    torch.testing.assert_close(gradients("clip_cov", case, estimator=silent), gradients("grpo", case, estimator={}))
    torch.manual_seed(0)
    weight = recipe_of("clip_cov").estimator.config.weights[0]
    wide = type(weight)(share=0.1, least=-torch.inf, most=torch.inf)
    drawn = wide(case.decisions, relative(case)[:, None], z(case).detach())
    assert int((drawn == 0).sum()) == int(0.1 * int(case.decisions.valid().sum()))
    assert bool((drawn[~case.decisions.valid()] == 1).all())


def test_kl_cov() -> None:
    def formula(case: Tabular) -> Tensor:
        """One decision, the one of largest covariance, pays for its log-ratio."""
        top = covariances(case)
        chosen = top == top.max()
        return tok(-relative(case)[:, None] * z(case).exp() + z(case).abs() * chosen, case)

    check_recipe("kl_cov", formula)


def test_kl_cov_with_a_share_of_zero_is_the_unclipped_gradient() -> None:
    case = tabular()
    none = [{"name": "covariance_kl", "share": 0.0}]
    torch.testing.assert_close(
        gradients("kl_cov", case, regularizers=none),
        gradients("grpo", case, estimator={"surrogate": "is", "aggregate": "tok"}),
    )


def test_gppo_value_is_that_of_ppo_and_its_gradient_survives_the_clip() -> None:
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
    (wanted,) = torch.autograd.grad(tok(-a * slope * z(case), case), case.logits)
    torch.testing.assert_close(found, wanted)


def test_dcpo_bounds_follow_the_old_probability() -> None:
    def formula(case: Tabular) -> Tensor:
        q = case.decisions.logp_old.exp()
        low = 0.5 + 0.5 * (1 - 4 * 0.16 / q).clamp(min=0).sqrt()
        high = (0.5 + 0.5 * (1 + 4 * 0.2 / q).sqrt()).clamp(max=10.0)
        ratio, a = z(case).exp(), relative(case)[:, None]
        return by_row(-torch.minimum(ratio * a, torch.minimum(torch.maximum(ratio, low), high) * a), case)

    check_recipe("dynamic_clipping", formula, drift=0.8)  # the first visit of every prompt is GRPO


def test_gbpo() -> None:
    def formula(case: Tabular) -> Tensor:
        value, group = rewards(case), case.decisions.need("group")
        median = torch.stack([torch.quantile(value[group == key], 0.5) for key in group])
        deviation = torch.stack([value[group == key].std() for key in group])
        a = ((value - median) / (deviation + 1e-6))[:, None]
        target = 0.7 + 0.6 * torch.sigmoid(a / 1e-4)
        return tok((z(case).exp() - target).abs() * a.abs(), case)

    check_recipe("gbpo", formula)


def test_gbpo_in_band_is_the_gradient_of_ppo() -> None:
    case = tabular(drift=0.0)
    advantage = recipe_of("gbpo").plain["advantage"]
    plain = {"bounds": {"name": "constant", "low": 0.3}, "aggregate": "tok"}
    torch.testing.assert_close(gradients("gbpo", case), gradients("grpo", case, advantage=advantage, estimator=plain))


def test_fiberpo() -> None:
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


def test_fiberpo_within_all_budgets_is_the_plain_ratio() -> None:
    case = tabular(drift=0.001)
    plain = {"surrogate": "is", "aggregate": "seq_mean"}
    torch.testing.assert_close(gradients("fiberpo", case), gradients("grpo", case, estimator=plain))


def test_r2vpo_and_its_multiplier() -> None:
    check_recipe("r2vpo", lambda c: tok(-relative(c)[:, None] * z(c).exp() + (z(c).exp() - 1) ** 2, c))
    case, recipe = tabular(), recipe_of("r2vpo")
    _, info = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    recipe.observe(case.decisions, info)
    measured = ((z(case).exp() - 1) ** 2)[case.decisions.valid()].mean().item()
    assert recipe.estimator.controllers["ratio_variance"].value == pytest.approx(1.0 + 10.0 * (measured - 0.04))


def test_a_multiplier_at_zero_can_rise_again() -> None:
    free = {"ratio_variance": {"name": "dual", "value": 0.0, "target": 0.01, "rate": 10.0}}
    case, recipe = tabular(), recipe_of("r2vpo", controllers=free)
    _, info = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    recipe.observe(case.decisions, info)
    assert recipe.estimator.controllers["ratio_variance"].value > 0


def disco(case: Tabular, score: str, tau: float | None) -> Tensor:
    mask, value, group = case.decisions.valid(), rewards(case), case.decisions.need("group")
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
def test_disco(name: str, score: str, tau: float | None, distance: float) -> None:
    check(recipe_of(name, select=[]), tabular(drift=distance), lambda c: disco(c, score, tau))
    ratios = {"name": "discriminative", "score": "ratio", "temperature": tau}
    check(recipe_of(name, select=[], objective=ratios), tabular(drift=distance), lambda c: disco(c, "ratio", tau))


def test_disco_limits() -> None:
    """The basic form is a policy gradient with (R - p) / (p (1 - p)); a high temperature is the basic form; no penalty
    within the limit of the KL."""
    case = tabular(drift=0.0)
    value, group = rewards(case), case.decisions.need("group")
    p = torch.stack([value[group == key].mean() for key in group])
    mixed = (p > 0) & (p < 1)
    a = torch.where(mixed, (value - p) / (p * (1 - p)).clamp(min=1e-9), 0.0)
    means = torch.stack([row[keep].mean() for row, keep in zip(case.logp(), case.decisions.valid(), strict=True)])
    size = (group == 0).sum()
    (wanted,) = torch.autograd.grad(-(a * means).sum() / size / group[mixed].unique().numel(), case.logits)
    basic = gradients("disco_b", case)
    torch.testing.assert_close(basic, wanted)
    hot = {"name": "discriminative", "score": "logp", "temperature": 1e6}
    torch.testing.assert_close(gradients("disco", case, objective=hot), basic, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_disco_learns_nothing_from_groups_that_agree(outcome: float) -> None:
    """Neither all failures nor all successes leave a gradient, or something that is not a number."""
    case = tabular()
    reward = case.decisions.need("reward").clone()
    reward[8:] = 0.0
    reward[8:, 0] = outcome
    agreed = Tabular(case.decisions.with_fields(reward=reward), case.tokens, case.logits)
    gradient = gradients("disco", agreed, regularizers=[])
    assert bool(gradient.isfinite().all()) and bool((gradient[2:] == 0).all()) and bool((gradient[0] != 0).any())


def test_hapo() -> None:
    def formula(case: Tabular) -> Tensor:
        d, mask = case.decisions, case.decisions.valid()
        level = d.need("entropy").clamp(min=1e-6).log()
        offset = level - torch.quantile(level[mask], 0.8)
        h = torch.where(offset > 0, offset / offset[mask].max(), -offset / offset[mask].min())
        value, group = rewards(case)[:, None].expand_as(level), d.need("group")
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


def test_hapo_with_equal_entropies_is_token_level_dapo() -> None:
    case = tabular(entropy=torch.full((16, 6), 0.7, dtype=torch.float64))
    assert bool((relative_entropy(case.decisions) == 0).all())
    stages = recipe_of("hapo").plain["advantage"]
    torch.testing.assert_close(
        gradients("hapo", case), gradients("grpo", case, advantage=stages, estimator={"aggregate": "tok"})
    )


def test_bupo_scored_by_the_last_layer_is_grpo() -> None:
    case = tabular()
    assert torch.equal(gradients("bupo", case), gradients("grpo", case))
    assert recipe_of("bupo").rollout["layer"]["updates"] == 30


def test_minirl() -> None:
    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        weight = (d.logp_old - d.need("logp_behaviour")).exp().clamp(max=2.0)
        return (ppo(case, relative(case, scaled=False)) * weight).masked_fill(~d.valid(), 0.0).sum(1).mean()

    check_recipe("minirl", formula)


def test_minirl_without_mismatch_is_reinforce_at_first() -> None:
    case = tabular(drift=0.0)
    same = Tabular(case.decisions.with_fields(logp_behaviour=case.decisions.logp_old), case.tokens, case.logits)
    a = relative(case, scaled=False)[:, None]
    plain = -(a * case.logp()).masked_fill(~case.decisions.valid(), 0.0).sum(1).mean()
    (wanted,) = torch.autograd.grad(plain, case.logits)
    torch.testing.assert_close(gradients("minirl", same), wanted)


def test_mdpo() -> None:
    def formula(case: Tabular) -> Tensor:
        ratio = z(case).exp()
        return tok(-relative(case)[:, None] * ratio + ratio * z(case) - ratio + 1, case)

    check_recipe("mdpo", formula)


def test_mdpo_with_a_large_step_is_the_unclipped_gradient() -> None:
    case = tabular()
    stages = [*recipe_of("grpo").plain["advantage"], {"name": "constant_scale", "divisor": 1e-8}]
    plain = {"surrogate": "is", "aggregate": "tok"}
    large, unclipped = (
        gradients(name, case, advantage=stages, **extra)
        for name, extra in (("mdpo", {}), ("grpo", {"estimator": plain}))
    )
    torch.testing.assert_close(1e-8 * large, 1e-8 * unclipped, rtol=1e-6, atol=1e-7)


def drifting(case: Tabular, alpha: float, beta: float) -> Tensor:
    a = relative(case)[:, None]
    gain = torch.where(a < 0, a * z(case), a * (z(case).exp() - 1))
    width = torch.where(a < 0, beta, alpha)
    return tok(-a * z(case).exp() + (gain - width * (gain / width).tanh()).clamp(min=0), case)


def test_ta_lpo_narrows_its_drift_until_the_end() -> None:
    check_recipe("ta_lpo", lambda case: drifting(case, 2.0, 0.6), drift=0.8)
    case, recipe = tabular(drift=0.8), recipe_of("ta_lpo")
    for _ in range(200):
        recipe.observe(case.decisions, {})
    check(recipe, case, lambda case: drifting(case, 0.2, 0.06))


def test_bgpo_is_a_bound_that_touches_at_the_old_policy() -> None:
    def formula(case: Tabular) -> Tensor:
        a = relative(case)[:, None]
        return by_row(torch.where(a < 0, -a * z(case).exp(), -a * (1 + z(case))), case)

    check_recipe("bgpo", formula)
    fresh = tabular(drift=0.0)
    mask, a = fresh.decisions.valid(), relative(fresh)
    averages = torch.stack([row[keep].mean() for row, keep in zip(z(fresh), mask, strict=True)])
    (wanted,) = torch.autograd.grad(-(a * averages.exp()).mean(), fresh.logits)
    torch.testing.assert_close(gradients("bgpo", fresh), wanted)
    assert math.isclose(-(a * averages.exp()).mean().item(), 0.0, abs_tol=1e-9)
