"""Tests of ratio recipes against their formulas and simpler limiting cases."""

from __future__ import annotations

import torch
from formulas import gradients, relative, tok, z
from tabular import Tabular, check, check_recipe, recipe_of, rewards, tabular
from torch import Tensor


def test_gbpo_recipe_matches_its_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        value, group = rewards(case), case.decisions.require("group")
        median = torch.stack([torch.quantile(value[group == key], 0.5) for key in group])
        deviation = torch.stack([value[group == key].std() for key in group])
        a = ((value - median) / (deviation + 1e-6))[:, None]
        target = 0.7 + 0.6 * torch.sigmoid(a / 1e-4)
        return tok((z(case).exp() - target).abs() * a.abs(), case)

    check_recipe("gbpo", formula)


def test_gbpo_gradient_within_the_bounds_equals_the_ppo_gradient() -> None:
    case = tabular(drift=0.0)
    advantage = recipe_of("gbpo").plain["advantage"]
    plain = {"bounds": {"name": "constant", "low": 0.3}, "aggregate": "token_mean"}
    torch.testing.assert_close(gradients("gbpo", case), gradients("grpo", case, advantage=advantage, estimator=plain))


def drifting(case: Tabular, alpha: float, beta: float) -> Tensor:
    a = relative(case)[:, None]
    gain = torch.where(a < 0, a * z(case), a * (z(case).exp() - 1))
    width = torch.where(a < 0, beta, alpha)
    return tok(-a * z(case).exp() + (gain - width * (gain / width).tanh()).clamp(min=0), case)


def test_ta_lpo_drift_widths_shrink_to_their_final_values() -> None:
    check_recipe("ta_lpo", lambda case: drifting(case, 2.0, 0.6), drift=0.8)
    case, recipe = tabular(drift=0.8), recipe_of("ta_lpo")
    for _ in range(200):
        recipe.observe(case.decisions, {})
    check(recipe, case, lambda case: drifting(case, 0.2, 0.06))
