"""Hybrid recipes compared with their written formulas: imitation, imitation with RL, weighted imitation."""

import pytest
import torch
from formulas import DISTANCES, gradients, relative, tok, z
from tabular import Tabular, check, check_recipe, ppo, recipe_of, rewards, tabular
from torch import Tensor


def imitation(case: Tabular, rows: Tensor | None = None) -> Tensor:
    """Gradient of the mean negative log-likelihood of some rows."""
    keep = case.decisions.valid() if rows is None else case.decisions.valid() & rows[:, None]
    (gradient,) = torch.autograd.grad(-case.logp()[keep].mean(), case.logits)
    return gradient


def test_sft_is_the_negative_log_likelihood_up_to_a_constant() -> None:
    case = tabular()
    torch.testing.assert_close(gradients("sft", case), imitation(case))
    check_recipe("sft", lambda c: tok(c.decisions.logp_old, c) - tok(c.logp(), c))


def test_rft_imitates_its_successes() -> None:
    case, recipe = tabular(), recipe_of("rft")
    rows = recipe.select(case.decisions)
    assert rows.tolist() == torch.nonzero(rewards(case)).flatten().tolist()
    chosen = case.decisions.select(rows)
    loss, _ = recipe.loss(chosen, recipe.advantage(chosen), case.logp()[rows])
    (found,) = torch.autograd.grad(loss, case.logits)
    torch.testing.assert_close(found, imitation(case, rewards(case) > 0))


def test_kdrl_loss_and_gradient_equal_the_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        gap = case.logp() - case.decisions.extra["logp_teacher"]
        return tok(ppo(case, relative(case)) + 0.005 * 0.5 * gap**2, case)

    check_recipe("kdrl", formula)


def test_kdrl_equals_grpo_without_kl_and_distillation_without_reward() -> None:
    case = tabular()
    none = {"kl_to": {"name": "anneal", "start": 0.0, "end": 0.0, "steps": 1}}
    torch.testing.assert_close(gradients("kdrl", case, controllers=none), gradients("grpo", case, estimator={}))
    unrewarded = tabular(reward=torch.zeros(16, 6, dtype=torch.float64))
    gap = unrewarded.logp() - unrewarded.decisions.extra["logp_teacher"]
    (wanted,) = torch.autograd.grad(0.005 * tok(0.5 * gap**2, unrewarded), unrewarded.logits)
    torch.testing.assert_close(gradients("kdrl", unrewarded), wanted)
    recipe = recipe_of("kdrl")
    for _ in range(100):
        recipe.observe(case.decisions, {"kl_to": torch.tensor(1.0)})
    assert recipe.controllers["kl_to"].value == pytest.approx(0.001)


def test_kdrl_applies_the_teacher_kl_only_to_failed_rollouts() -> None:
    case = tabular()
    failed = [{"name": "kl_to", "key": "logp_teacher", "kind": "k2", "failed": True}]
    gap = case.logp() - case.decisions.extra["logp_teacher"]
    wanted = tok(ppo(case, relative(case)) + 0.005 * 0.5 * gap**2 * (rewards(case) == 0)[:, None], case)
    loss = recipe_of("kdrl", regularizers=failed)
    found, _ = loss.loss(case.decisions, loss.advantage(case.decisions), case.logp())
    torch.testing.assert_close(found, wanted)


def nft(case: Tabular, *, weight: str) -> Tensor:
    d, value, group = case.decisions, rewards(case), case.decisions.require("group")
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(d)):
        q = value[group == group[row]].mean()
        if q in (0.0, 1.0):
            continue
        factor = (1 - q) if weight == "linear" else ((1 - q) / q).sqrt()
        log = z(case)[row][d.valid()[row]]
        left = (1 - q * log.exp()) / (1 - q)
        held = left + (left.clamp(min=1.0) - left).detach()
        total = total - factor * (log if value[row] > 0 else held.log()).sum()
    return total / len(d) / 1000.0


def test_nft_loss_and_gradient_equal_the_written_formula() -> None:
    for distance in DISTANCES:
        check(recipe_of("nft", select=[]), tabular(drift=distance), lambda c: nft(c, weight="linear"))


def test_on_policy_nft_gradient_equals_dr_grpo_or_grpo() -> None:
    case = tabular(drift=0.0)
    const = {"aggregate": "fixed_length", "length": 1000.0}
    centred = recipe_of("nft").plain["advantage"]
    torch.testing.assert_close(
        gradients("nft", case, select=[]), gradients("grpo", case, advantage=centred, estimator=const)
    )
    scaled = [centred[0], {"name": "scale", "scope": centred[0]["scope"], "unbiased": False, "eps": 0.0}]
    standard = {"surrogate": "nft_scaled", **const}
    silent = {"advantage": scaled, "select": ["mixed"]}
    rows = recipe_of("grpo", select=["mixed"]).select(case.decisions)
    mixed_case = Tabular(case.decisions.select(rows), case.tokens[rows], case.logits)
    found = gradients("nft", mixed_case, estimator=standard, **silent)
    torch.testing.assert_close(found, gradients("grpo", mixed_case, advantage=scaled, estimator=const))
    (wanted,) = torch.autograd.grad(nft(case, weight="sqrt") * 16 / len(rows), case.logits)
    torch.testing.assert_close(found, wanted)
