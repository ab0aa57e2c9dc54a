"""Tests of hybrid recipes against their written formulas: imitation, mixed and weighted imitation."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import DISTANCES, gradients, to_reference, tok, z
from tabular import PROMPTS, Tabular, check, check_recipe, recipe_of, rewards, tabular
from torch import Tensor
from torch.nn.functional import softplus

from robopolicy.core.decisions import Decisions

SHOWN = torch.tensor([0, 0, 0, 1]).repeat(PROMPTS)  # the last row of every prompt is a demonstration


def selected(name: str, decisions: Decisions, **changes) -> list[int]:
    return recipe_of(name, **changes).select(decisions, torch.Generator().manual_seed(0)).tolist()


def imitation(case: Tabular, rows: Tensor | None = None) -> Tensor:
    """Gradient of the mean negative log-likelihood of some rows."""
    keep = case.decisions.valid() if rows is None else case.decisions.valid() & rows[:, None]
    (gradient,) = torch.autograd.grad(-case.logp()[keep].mean(), case.logits)
    return gradient


def hpt(case: Tabular, *, gate: float) -> Tensor:
    """Per prompt: imitation if at most `gate` of its own rollouts succeed, else Dr. GRPO without a clip."""
    d, value, group = case.decisions, rewards(case), case.decisions.require("group")
    own, losses, shown = d.require("source") == 0, [], []
    for key in group.unique():
        own_rows = (group == key) & own
        if value[own_rows].sum() <= gate:
            shown.append(case.logp()[(group == key) & ~own][d.valid()[(group == key) & ~own]])
            continue
        for row in torch.nonzero(own_rows).flatten():
            a = value[row] - value[own_rows].mean()
            losses.append((-a * z(case)[row][d.valid()[row]].exp()).mean())
    reinforced = torch.stack(losses).mean() if losses else torch.zeros(())
    return reinforced - (torch.cat(shown).mean() if shown else 0.0)


@pytest.mark.parametrize("gate", [-1, 0, 1, 8])
def test_hpt_switches_between_imitation_and_policy_gradient_per_prompt(gate: int) -> None:
    case = tabular(source=SHOWN)
    recipe = recipe_of("hpt", select=[{"name": "demonstration_switch", "gate": gate}])
    rows = recipe.select(case.decisions)
    chosen = case.decisions.select(rows)
    loss, _ = recipe.loss(chosen, recipe.advantage(chosen), case.logp()[rows])
    target = hpt(case, gate=gate)
    torch.testing.assert_close(loss, target)
    (found,) = torch.autograd.grad(loss, case.logits)
    (expected,) = torch.autograd.grad(target, case.logits)
    torch.testing.assert_close(found, expected)
    own = SHOWN[rows] == 0
    if gate == -1:
        assert bool(own.all())  # no imitation
    if gate == 8:
        assert not bool(own.any())  # only imitation


def test_hpt_without_demonstrations_selects_all_rollouts() -> None:
    case = tabular()
    assert selected("hpt", case.decisions) == list(range(16))


def test_otr_gradient_equals_probability_weighted_imitation() -> None:
    case = tabular()
    weighted = -(case.logp().detach().exp() * case.logp())
    (target,) = torch.autograd.grad(tok(weighted, case), case.logits)
    torch.testing.assert_close(gradients("otr", case), target)


def test_otr_gradient_equals_the_expected_reinforce_gradient_over_tokens() -> None:
    """REINFORCE with the reward 1[token = shown] over all tokens, weighted by their probability: no samples needed."""
    case = tabular()
    log = case.distribution()  # (N, T, V)
    reward = torch.nn.functional.one_hot(case.tokens, log.shape[2]).double()
    expected = -(log.detach().exp() * reward * log).sum(2)
    (target,) = torch.autograd.grad(tok(expected, case), case.logits)
    torch.testing.assert_close(gradients("otr", case), target)


def test_a_lol_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        a, total = rewards(case) - 0.3, z(case).sum(1)
        return -(a * total.detach().exp().clamp(0.1, 1.9) * total).mean()

    for distance in DISTANCES:
        check(recipe_of("a_lol", select=[]), tabular(drift=distance), formula)


def test_a_lol_selects_positive_advantages_and_imitates_at_equal_weights() -> None:
    case = tabular()
    better = torch.nonzero(rewards(case) > 0.3).flatten().tolist()
    every = [{"name": "positive", "key": "mean_ref", "share": 1.0}]
    assert selected("a_lol", case.decisions, select=every) == better
    half = selected("a_lol", case.decisions)
    assert len(half) == len(better) // 2 and set(half) < set(better)
    plain = {"surrogate": "policy_gradient", "aggregate": "token_mean"}
    torch.testing.assert_close(
        gradients("a_lol", case, select=[], advantage_source="constant_one", advantage=[], estimator=plain),
        imitation(case),
    )


def test_f_sft_matches_its_formula_and_equals_sft_with_reverse_kl() -> None:
    check_recipe("f_sft", lambda c: tok(softplus(-to_reference(c)) - math.log(2.0), c))
    case = tabular()
    kl = {"name": "divergence_imitation", "divergence": "reverse_kl"}
    torch.testing.assert_close(gradients("f_sft", case, objective=kl), gradients("sft", case))
    with pytest.raises(ValueError, match="Unknown divergence 'total_variation' to imitate by; known: chi_squared"):
        recipe_of("f_sft", objective={"name": "divergence_imitation", "divergence": "total_variation"})
