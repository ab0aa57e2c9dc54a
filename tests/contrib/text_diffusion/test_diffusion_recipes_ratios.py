"""Ratio recipes compared with their written formulas, and the limits in which they equal simpler methods."""

from __future__ import annotations

import math

import torch
from formulas import by_row, gradients, relative, z
from tabular import Tabular, check_recipe, tabular
from torch import Tensor


def test_bgpo_matches_its_formula_and_has_the_exact_gradient_on_policy() -> None:
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
