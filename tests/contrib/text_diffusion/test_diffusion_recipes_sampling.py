"""Recipes of the sampling side against their written formulas, value and gradient, and their limits.

What they play (hints, trees, replays) is tested beside the parts in tests/rollout; here is what they make of the rows.
"""

from __future__ import annotations

import torch
from tabular import Tabular, check_recipe, recipe_of, rewards, standardised, tabular
from torch import Tensor

from robopolicy.contrib.text_diffusion.recipe_parts import UncertainPrefix


def test_only_uncertain_given_pieces_are_learned():
    """IGPO: of the injected decisions the fifth with the highest entropy; without them GRPO with ratios of rows."""

    def formula(case: Tabular) -> Tensor:
        d, advantage = case.decisions, standardised(rewards(case), case.decisions.require("group"))
        injected = d.require_extra("injected") & d.valid()
        count = max(int(0.2 * int(injected.sum())), 1) if bool(injected.any()) else 0
        level = d.require("entropy").masked_fill(~injected, -1.0).flatten().topk(count).indices
        keep = d.valid() & ~injected
        keep.view(-1)[level] = True
        logp = case.logp()
        change = torch.where(keep, logp, logp.detach()) - d.logp_old  # dropped ones count in the ratio of the row
        ratio = torch.stack([row[on].mean() for row, on in zip(change, d.valid(), strict=True)]).exp()[:, None]
        a = advantage[:, None]
        losses = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).expand(d.shape)
        rows = [row[on].mean() if bool(on.any()) else row.sum() * 0 for row, on in zip(losses, keep, strict=True)]
        kept = keep.any(1)
        return torch.stack(rows)[kept].mean()

    check_recipe("igpo", formula)
    check_recipe("igpo", formula, extra={"injected": torch.zeros(16, 6, dtype=torch.bool)})


def test_dropped_given_pieces_get_no_gradient():
    """IGPO (Zhao et al. 2025): also not through the ratio of their row, to whose value they belong."""
    case, recipe = tabular(), recipe_of("igpo")
    d = case.decisions
    logp = case.logp().detach().requires_grad_()
    loss, _ = recipe.loss(d, recipe.advantage(d), logp, case.entropy())
    (gradient,) = torch.autograd.grad(loss, logp)
    keep = UncertainPrefix("injected", 0.2)(d, torch.zeros(16, 1), d.logp_old) & d.valid()
    assert (d.valid() & ~keep).any() and (gradient[~keep] == 0).all() and (gradient[keep] != 0).any()
