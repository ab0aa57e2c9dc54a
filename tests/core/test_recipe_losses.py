"""The loss of recipes for advantages of any kind: surrogate, bounds and aggregation, without what masks and adds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tabular import Tabular, ppo, recipe_of, seq_mean, tabular
from torch import Tensor
from torch.testing import assert_close

from robopolicy.core.decisions import Decisions
from robopolicy.recipe_files import read_recipe

CLIPPED: dict[str, tuple[float, float, float, str]] = {  # low, high, cap at negative advantages, aggregation
    "gigpo": (0.2, 0.2, math.inf, "seq_mean"),
    "optimal_token_baseline": (0.2, 0.2, math.inf, "tok"),
    "pass_at_k": (0.2, 0.2, math.inf, "seq_mean"),
    "t_ppo": (0.2, 0.2, math.inf, "tok"),
    "v0": (0.2, 0.2, math.inf, "seq_mean"),
    "distribution_dcpo": (0.2, 0.2, 3.0, "tok"),
    "aspo": (0.2, 0.2, math.inf, "seq_mean"),
    "d3s": (0.2, 0.2, math.inf, "tok"),
    "segment_spo": (0.2, 0.2, math.inf, "tok"),
    "pipo": (0.2, 0.2, math.inf, "seq_mean"),
    "loop": (0.2, 0.2, math.inf, "tok"),
    "poad": (0.2, 0.2, math.inf, "tok"),
    "hgpo": (0.2, 0.2, math.inf, "seq_mean"),
    "poise": (0.2, 0.2, math.inf, "seq_mean"),
    "adora": (0.2, 0.2, math.inf, "seq_mean"),
    "adacot": (0.2, 0.2, math.inf, "tok"),
    "bupo": (0.2, 0.2, math.inf, "seq_mean"),
    "single_stream": (0.2, 0.28, 10.0, "tok"),
    "lite_ppo": (0.2, 0.2, math.inf, "tok"),
    "trajectory_selection": (0.2, 0.2, math.inf, "seq_mean"),
    "shioenv": (0.2, 0.2, math.inf, "tok"),
    "capo": (0.2, 0.2, math.inf, "tok"),
    "empg": (0.2, 0.2, math.inf, "tok"),
    "polychromic": (0.2, 0.2, math.inf, "seq_mean"),
    "duration_aware": (0.2, 0.2, math.inf, "tok"),
    "clip_cov": (0.2, 0.2, math.inf, "tok"),
    "bnpo": (0.2, 0.28, 10.0, "seq_sum"),
    "copo": (0.2, 0.2, math.inf, "seq_mean"),
    "self": (0.2, 0.2, math.inf, "seq_mean"),
    "pf_ppo": (0.2, 0.2, math.inf, "tok"),
    "attention_rhythm": (0.2, 0.2, math.inf, "seq_mean"),
    "spae": (0.2, 0.2, math.inf, "tok"),
    "canon": (0.2, 0.28, math.inf, "const"),
    "progrpo": (0.2, 0.28, math.inf, "tok"),
    "hiper": (0.2, 0.2, math.inf, "tok"),
    "mixed_advantage": (0.2, 0.2, math.inf, "tok"),
    "tempo": (0.2, 0.2, math.inf, "tok"),
    "salt": (0.2, 0.2, math.inf, "seq_mean"),
    "cm2": (0.2, 0.2, math.inf, "tok"),
    "a2p": (0.2, 0.2, math.inf, "tok"),
    "proact": (0.2, 0.2, math.inf, "tok"),
}
PLAIN = {  # policy gradients by log-probability
    "opo": "seq_sum",
    "reinforce": "seq_sum",
    "remax": "seq_sum",
    "rloo": "seq_sum",
    "gpg": "tok",
    "rft": "tok",
    "sft": "tok",
    "pg_rank": "seq_sum",
    "pcpg": "seq_sum",
    "ded": "seq_mean",
    "read": "seq_mean",
}


def collected(how: str, losses: Tensor, valid: Tensor) -> Tensor:
    """Mean over decisions, or over rows of their mean, their sum, or their sum over 8192."""
    if how == "tok":
        return losses[valid].mean()
    if how == "seq_mean":
        return seq_mean(losses, valid)
    return (losses * valid).sum(1).mean() / (8192.0 if how == "const" else 1.0)


def case_and_advantage() -> tuple[Tabular, Tensor]:
    """A policy far from the one that drew the batch, so that everything clips, and an advantage per decision."""
    case, generator = tabular(), torch.Generator().manual_seed(5)
    away, advantage = torch.randn(2, *case.decisions.shape, generator=generator, dtype=torch.float64)
    return replace(case, decisions=case.decisions.with_fields(logp_old=case.decisions.logp_old + 2.0 * away)), advantage


def loss_alone(name: str, case: Tabular, advantage: Tensor) -> Tensor:
    """Of the surrogate of a recipe."""
    bare: dict[str, Any] = {"masks": [], "weights": []}
    recipe = recipe_of(name, estimator=read_recipe(name)["estimator"] | bare, objective=None, regularizers=[])
    return recipe.loss(case.decisions, advantage, case.logp(), case.entropy())[0]


@pytest.mark.parametrize("name", CLIPPED)
def test_the_clipped_loss_of_a_recipe(name: str) -> None:
    low, high, cap, how = CLIPPED[name]
    case, advantage = case_and_advantage()
    losses = ppo(case, advantage, low, high)
    pushed = (losses / -advantage)[case.decisions.valid() & (advantage < 0)]
    assert bool((pushed > 10.0).any()), "every cap is in reach"
    losses = torch.where(advantage < 0, torch.minimum(losses, -cap * advantage), losses)
    assert_close(loss_alone(name, case, advantage), collected(how, losses, case.decisions.valid()))


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_loss_of_a_recipe(name: str) -> None:
    case, advantage = case_and_advantage()
    losses = -advantage * (case.logp() - case.decisions.logp_old)
    assert_close(loss_alone(name, case, advantage), collected(PLAIN[name], losses, case.decisions.valid()))


def test_sets_have_one_ratio() -> None:
    """I (3.10): the product over the picks."""
    case, advantage = case_and_advantage()
    advantage, valid = advantage[:, :1], case.decisions.valid()
    ratio = ((case.logp() - case.decisions.logp_old) * valid).sum(1, keepdim=True).exp()
    losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).expand(valid.shape)
    assert_close(loss_alone("cacovid", case, advantage), seq_mean(losses, valid))


@pytest.mark.parametrize("name", ["dapo", "hapo", "nft", "disco", "disco_b"])
def test_groups_that_agree_are_left_out(name: str) -> None:
    case = tabular()
    rows = recipe_of(name).select(case.decisions)
    groups = set(case.decisions.need("group")[rows].tolist())
    assert 0 in groups and 1 not in groups  # the first is mixed, the second has failed


def test_outliers_with_negative_advantage_are_capped() -> None:
    """2.08: entropies that are all equal leave bounds of 0.2, weights of 1 and the cap of 3."""
    change, ones = torch.tensor([[math.log(50.0)]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    case = Decisions(-change, entropy=ones, reward=ones, group=torch.zeros(1, dtype=torch.long))
    loss, _ = recipe_of("hapo").loss(case, -ones, 0.0 * change)
    assert_close(loss, torch.tensor(3.0, dtype=torch.float64))
