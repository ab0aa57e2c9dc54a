"""Recipes with masks and references: the restricted support of NLPO."""

import pytest
import torch
from tabular import tabular

from robopolicy.text.generation import masked_log_softmax, top_p_support


@pytest.mark.parametrize("p", [0.5, 0.9, 1.0])
def test_nlpo_policy_has_zero_probability_outside_the_top_p_support(p: float) -> None:
    """NLPO: the old and the new policy have the same support; the full support gives the unrestricted policy."""
    case = tabular()
    lagged = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    support = top_p_support(lagged, p)
    new = masked_log_softmax(case.logits, support)
    assert bool((new.exp()[~support] == 0).all())
    torch.testing.assert_close(new.exp().sum(-1), torch.ones(4, 6, dtype=torch.float64))
    inside = (lagged.softmax(-1) * support).sum(-1)
    assert bool((inside >= p - 1e-9).all())
    fewer = inside - lagged.softmax(-1).masked_fill(~support, 2.0).min(-1).values
    assert bool((fewer < p).all())  # without its least likely choice the support holds less than p
    if p == 1.0:
        torch.testing.assert_close(new, case.logits.log_softmax(-1))
