"""Tests of the losses of contributed recipes for arbitrary advantages."""

from __future__ import annotations

import math

import pytest
import torch
from recipe_losses import case_and_advantage, check_clipped_loss, check_plain_loss, loss_alone
from tabular import recipe_of, seq_mean, tabular
from torch.testing import assert_close

from robopolicy.core.decisions import Decisions

CLIPPED: dict[str, tuple[float, float, float, str]] = {  # low, high, cap at negative advantages, aggregation
    "t_ppo": (0.2, 0.2, math.inf, "token_mean"),
    "v0": (0.2, 0.2, math.inf, "sequence_mean"),
    "distribution_dcpo": (0.2, 0.2, 3.0, "token_mean"),
    "aspo": (0.2, 0.2, math.inf, "sequence_mean"),
    "d3s": (0.2, 0.2, math.inf, "token_mean"),
    "segment_spo": (0.2, 0.2, math.inf, "token_mean"),
    "pipo": (0.2, 0.2, math.inf, "sequence_mean"),
    "loop": (0.2, 0.2, math.inf, "token_mean"),
    "poad": (0.2, 0.2, math.inf, "token_mean"),
    "hgpo": (0.2, 0.2, math.inf, "sequence_mean"),
    "poise": (0.2, 0.2, math.inf, "sequence_mean"),
    "adora": (0.2, 0.2, math.inf, "sequence_mean"),
    "adacot": (0.2, 0.2, math.inf, "token_mean"),
    "bupo": (0.2, 0.2, math.inf, "sequence_mean"),
    "lite_ppo": (0.2, 0.2, math.inf, "token_mean"),
    "trajectory_selection": (0.2, 0.2, math.inf, "sequence_mean"),
    "shioenv": (0.2, 0.2, math.inf, "token_mean"),
    "capo": (0.2, 0.2, math.inf, "token_mean"),
    "empg": (0.2, 0.2, math.inf, "token_mean"),
    "duration_aware": (0.2, 0.2, math.inf, "token_mean"),
    "bnpo": (0.2, 0.28, 10.0, "sequence_sum"),
    "copo": (0.2, 0.2, math.inf, "sequence_mean"),
    "self": (0.2, 0.2, math.inf, "sequence_mean"),
    "pf_ppo": (0.2, 0.2, math.inf, "token_mean"),
    "attention_rhythm": (0.2, 0.2, math.inf, "sequence_mean"),
    "spae": (0.2, 0.2, math.inf, "token_mean"),
    "canon": (0.2, 0.28, math.inf, "fixed_length"),
    "progrpo": (0.2, 0.28, math.inf, "token_mean"),
    "hiper": (0.2, 0.2, math.inf, "token_mean"),
    "mixed_advantage": (0.2, 0.2, math.inf, "token_mean"),
    "tempo": (0.2, 0.2, math.inf, "token_mean"),
    "salt": (0.2, 0.2, math.inf, "sequence_mean"),
    "cm2": (0.2, 0.2, math.inf, "token_mean"),
    "a2p": (0.2, 0.2, math.inf, "token_mean"),
    "proact": (0.2, 0.2, math.inf, "token_mean"),
}
SCALAR_OPTIONS = {  # policy gradients by log-probability
    "pg_rank": "sequence_sum",
    "pcpg": "sequence_sum",
    "ded": "sequence_mean",
    "read": "sequence_mean",
}


@pytest.mark.parametrize("name", CLIPPED)
def test_the_clipped_loss_of_a_contributed_recipe(name: str) -> None:
    check_clipped_loss(name, *CLIPPED[name])


@pytest.mark.parametrize("name", SCALAR_OPTIONS)
def test_the_plain_loss_of_a_contributed_recipe(name: str) -> None:
    check_plain_loss(name, SCALAR_OPTIONS[name])


def test_cacovid_uses_one_ratio_per_set() -> None:
    """Limit of CaCoVID (Ma et al. 2026): the product over the picks."""
    case, advantage = case_and_advantage()
    advantage, valid = advantage[:, :1], case.decisions.valid()
    ratio = ((case.logp() - case.decisions.logp_old) * valid).sum(1, keepdim=True).exp()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).expand(valid.shape)
    assert_close(loss_alone("cacovid", case, advantage), seq_mean(losses, valid))


@pytest.mark.parametrize("name", ["hapo", "disco", "disco_b"])
def test_groups_with_equal_rewards_are_excluded(name: str) -> None:
    case = tabular()
    rows = recipe_of(name).select(case.decisions)
    groups = set(case.decisions.require("group")[rows].tolist())
    assert 0 in groups and 1 not in groups  # the first group is mixed, the second has only failures


@pytest.mark.parametrize(("name", "cap"), [("hapo", 3.0), ("dynamic_clipping", 10.0)])
def test_outliers_with_negative_advantage_are_capped_and_have_no_gradient(name: str, cap: float) -> None:
    """HAPO (Liu et al. 2025) and DCPO (Yang et al. 2025) at ratio 50; equal entropies leave HAPO weights of 1."""
    change, ones = torch.tensor([[math.log(50.0)]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    case = Decisions(-change, entropy=ones, reward=ones, group=torch.zeros(1, dtype=torch.long))
    logp = torch.zeros_like(change, requires_grad=True)
    loss, _ = recipe_of(name).loss(case, -ones, logp)
    assert_close(loss.detach(), torch.tensor(cap, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(loss, logp)
    assert not gradient.any()
