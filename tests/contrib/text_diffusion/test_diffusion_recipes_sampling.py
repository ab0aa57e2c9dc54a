"""Rollout recipes compared with their written formulas, value and gradient, and their limiting cases.

The tests in tests/rollout cover the rollouts (hints, trees, replays); the tests here cover the losses on their rows.
"""

from __future__ import annotations

import torch
from tabular import Tabular, check_recipe, recipe_of, rewards, standardised, tabular
from torch import Tensor

from robopolicy.contrib.text_diffusion.recipe_parts import UncertainPrefix


def test_igpo_trains_only_the_most_uncertain_injected_tokens():
    """IGPO trains the fifth of injected decisions with the highest entropy; without any it is GRPO on row ratios."""

    def formula(case: Tabular) -> Tensor:
        d, advantage = case.decisions, standardised(rewards(case), case.decisions.require("group"))
        injected = d.require_extra("injected") & d.valid()
        count = max(int(0.2 * int(injected.sum())), 1) if bool(injected.any()) else 0
        level = d.require("entropy").masked_fill(~injected, -1.0).flatten().topk(count).indices
        keep = d.valid() & ~injected
        keep.view(-1)[level] = True
        logp = case.logp()
        change = torch.where(keep, logp, logp.detach()) - d.logp_old  # dropped decisions enter the ratio of the row
        ratio = torch.stack([row[on].mean() for row, on in zip(change, d.valid(), strict=True)]).exp()[:, None]
        a = advantage[:, None]
        losses = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).expand(d.shape)
        rows = [row[on].mean() if bool(on.any()) else row.sum() * 0 for row, on in zip(losses, keep, strict=True)]
        trained = keep.any(1)
        return torch.stack(rows)[trained].mean()

    check_recipe("igpo", formula)
    check_recipe("igpo", formula, extra={"injected": torch.zeros(16, 6, dtype=torch.bool)})


def test_igpo_dropped_injected_tokens_get_no_gradient():
    """IGPO (Zhao et al. 2025): a dropped decision enters the value of its row ratio, but not the gradient."""
    case, recipe = tabular(), recipe_of("igpo")
    d = case.decisions
    logp = case.logp().detach().requires_grad_()
    loss, _ = recipe.loss(d, recipe.advantage(d), logp, case.entropy())
    (gradient,) = torch.autograd.grad(loss, logp)
    keep = UncertainPrefix("injected", 0.2)(d, torch.zeros(16, 1), d.logp_old) & d.valid()
    assert (d.valid() & ~keep).any() and (gradient[~keep] == 0).all() and (gradient[keep] != 0).any()
