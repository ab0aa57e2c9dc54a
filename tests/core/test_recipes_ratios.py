"""Ratio recipes compared with their written formulas, and the limits in which they equal simpler methods."""

import torch
from formulas import DISTANCES, by_row, gradients, relative, tok, z
from tabular import Tabular, check, check_recipe, ppo, recipe_of, rewards, tabular
from torch import Tensor


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


def test_gmpo_is_grpo_at_ratio_one_and_unclipped_gspo_without_bounds() -> None:
    fresh = tabular(drift=0.0)
    torch.testing.assert_close(gradients("gmpo", fresh), gradients("grpo", fresh))
    wide = {"name": "geometric_mean", "low": 50.0, "high": 50.0}
    unclipped = {
        "level": "sequence",
        "reduction": "mean",
        "surrogate": "importance_sampling",
        "aggregate": "sequence_mean",
    }
    far = tabular(drift=0.8)
    torch.testing.assert_close(gradients("gmpo", far, objective=wide), gradients("gspo", far, estimator=unclipped))


def test_dapo() -> None:
    for distance in DISTANCES:
        check(recipe_of("dapo", select=[]), tabular(drift=distance), lambda c: tok(ppo(c, relative(c), 0.2, 0.28), c))


def test_dynamic_sampling_changes_only_the_denominator() -> None:
    """Groups with equal outcomes have no advantage, so dropping them leaves the sum of the losses unchanged."""
    case, recipe = tabular(), recipe_of("dapo")
    rows = recipe.select(case.decisions)
    value, group = rewards(case), case.decisions.require("group")
    assert rows.tolist() == [i for i in range(len(value)) if value[group == group[i]].unique().numel() > 1]
    selected = case.decisions.select(rows)
    part, _ = recipe.loss(selected, recipe.advantage(selected), case.logp()[rows])
    whole, _ = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    torch.testing.assert_close(part * selected.valid().sum(), whole * case.decisions.valid().sum())


def test_cispo_is_the_policy_gradient_weighted_by_the_clamped_ratio() -> None:
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


def test_clip_cov_removes_the_loss_of_candidate_decisions() -> None:
    """With a share of 1 every candidate is chosen, so the choice is not random."""
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


def test_clip_cov_equals_ppo_at_share_zero_and_masks_the_configured_share() -> None:
    case = tabular()
    silent = {"weights": [{"name": "clip_covariance", "share": 0.0}]}
    torch.testing.assert_close(gradients("clip_cov", case, estimator=silent), gradients("grpo", case, estimator={}))
    torch.manual_seed(0)
    weight = recipe_of("clip_cov").estimator.config.weights[0]
    wide = type(weight)(share=0.1, least=-torch.inf, most=torch.inf)
    weights = wide(case.decisions, relative(case)[:, None], z(case).detach())
    assert int((weights == 0).sum()) == int(0.1 * int(case.decisions.valid().sum()))
    assert bool((weights[~case.decisions.valid()] == 1).all())


def test_kl_cov_loss_and_gradient_equal_the_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        """The decision of largest covariance has a penalty on its log-ratio."""
        top = covariances(case)
        chosen = top == top.max()
        return tok(-relative(case)[:, None] * z(case).exp() + z(case).abs() * chosen, case)

    check_recipe("kl_cov", formula)


def test_kl_cov_at_share_zero_equals_the_unclipped_gradient() -> None:
    case = tabular()
    none = [{"name": "covariance_kl", "share": 0.0}]
    torch.testing.assert_close(
        gradients("kl_cov", case, regularizers=none),
        gradients("grpo", case, estimator={"surrogate": "importance_sampling", "aggregate": "token_mean"}),
    )


def test_mdpo_loss_and_gradient_equal_the_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        ratio = z(case).exp()
        return tok(-relative(case)[:, None] * ratio + ratio * z(case) - ratio + 1, case)

    check_recipe("mdpo", formula)


def test_mdpo_with_a_large_step_equals_the_unclipped_gradient() -> None:
    case = tabular()
    stages = [*recipe_of("grpo").plain["advantage"], {"name": "constant_scale", "divisor": 1e-8}]
    plain = {"surrogate": "importance_sampling", "aggregate": "token_mean"}
    large, unclipped = (
        gradients(name, case, advantage=stages, **extra)
        for name, extra in (("mdpo", {}), ("grpo", {"estimator": plain}))
    )
    torch.testing.assert_close(1e-8 * large, 1e-8 * unclipped, rtol=1e-6, atol=1e-7)
