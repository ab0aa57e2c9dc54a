"""Checks of recipe losses for given advantages: surrogate, bounds and aggregation, without masks and regularizers."""

from dataclasses import replace
from typing import Any

import torch
from tabular import Tabular, ppo, recipe_of, seq_mean, tabular
from torch import Tensor
from torch.testing import assert_close

from robopolicy.recipe_files import read_recipe


def collected(how: str, losses: Tensor, valid: Tensor) -> Tensor:
    """Mean over decisions, or over rows of the row's mean, sum, or sum divided by 8192."""
    if how == "token_mean":
        return losses[valid].mean()
    if how == "sequence_mean":
        return seq_mean(losses, valid)
    return (losses * valid).sum(1).mean() / (8192.0 if how == "fixed_length" else 1.0)


def case_and_advantage() -> tuple[Tabular, Tensor]:
    """A policy so far from the behaviour policy that all clips are active, and an advantage per decision."""
    case, generator = tabular(), torch.Generator().manual_seed(5)
    away, advantage = torch.randn(2, *case.decisions.shape, generator=generator, dtype=torch.float64)
    return replace(case, decisions=case.decisions.with_fields(logp_old=case.decisions.logp_old + 2.0 * away)), advantage


def loss_alone(name: str, case: Tabular, advantage: Tensor) -> Tensor:
    """Loss of the surrogate of a recipe."""
    bare: dict[str, Any] = {"masks": [], "weights": []}
    recipe = recipe_of(name, estimator=read_recipe(name)["estimator"] | bare, objective=None, regularizers=[])
    return recipe.loss(case.decisions, advantage, case.logp(), case.entropy())[0]


def check_clipped_loss(name: str, low: float, high: float, cap: float, how: str) -> None:
    """A recipe's loss equals PPO's loss with these bounds and this cap for negative advantages."""
    case, advantage = case_and_advantage()
    losses = ppo(case, advantage, low, high)
    pushed = (losses / -advantage)[case.decisions.valid() & (advantage < 0)]
    assert bool((pushed > 10.0).any()), "every cap is in reach"
    losses = torch.where(advantage < 0, torch.minimum(losses, -cap * advantage), losses)
    assert_close(loss_alone(name, case, advantage), collected(how, losses, case.decisions.valid()))


def check_plain_loss(name: str, how: str) -> None:
    """A recipe's loss equals the log-probability policy gradient loss."""
    case, advantage = case_and_advantage()
    losses = -advantage * (case.logp() - case.decisions.logp_old)
    assert_close(loss_alone(name, case, advantage), collected(how, losses, case.decisions.valid()))
