"""Recipes of section 8 against their written formulas: imitation, imitation and reinforcement, weighted imitation."""

from __future__ import annotations

import math

import pytest
import torch
from formulas import DISTANCES, gradients, relative, to_reference, tok, z
from tabular import PROMPTS, Tabular, check, check_recipe, ppo, recipe_of, rewards, tabular
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


def hpt(case: Tabular, *, gate: float) -> Tensor:
    """By prompt: the demonstration where at most `gate` of its own rollouts succeed, else Dr. GRPO without a clip."""
    d, value, group = case.decisions, rewards(case), case.decisions.need("group")
    own, losses, shown = d.need("source") == 0, [], []
    for key in group.unique():
        mine = (group == key) & own
        if value[mine].sum() <= gate:
            shown.append(case.logp()[(group == key) & ~own][d.valid()[(group == key) & ~own]])
            continue
        for row in torch.nonzero(mine).flatten():
            a = value[row] - value[mine].mean()
            losses.append((-a * z(case)[row][d.valid()[row]].exp()).mean())
    reinforced = torch.stack(losses).mean() if losses else torch.zeros(())
    return reinforced - (torch.cat(shown).mean() if shown else 0.0)


@pytest.mark.parametrize("gate", [-1, 0, 1, 8])
def test_hpt_switches_by_prompt(gate: int) -> None:
    case = tabular(source=SHOWN)
    recipe = recipe_of("hpt", select=[{"name": "demonstration_switch", "gate": gate}])
    rows = recipe.select(case.decisions)
    chosen = case.decisions.select(rows)
    loss, _ = recipe.loss(chosen, recipe.advantage(chosen), case.logp()[rows])
    wanted = hpt(case, gate=gate)
    torch.testing.assert_close(loss, wanted)
    (found,) = torch.autograd.grad(loss, case.logits)
    (expected,) = torch.autograd.grad(wanted, case.logits)
    torch.testing.assert_close(found, expected)
    own = SHOWN[rows] == 0
    if gate == -1:
        assert bool(own.all())  # nothing is imitated
    if gate == 8:
        assert not bool(own.any())  # nothing else is done


def test_hpt_without_demonstrations_learns_from_what_there_is() -> None:
    case = tabular()
    assert selected("hpt", case.decisions) == list(range(16))


def test_one_token_rollouts_in_the_limit() -> None:
    case = tabular()
    weighted = -(case.logp().detach().exp() * case.logp())
    (wanted,) = torch.autograd.grad(tok(weighted, case), case.logits)
    torch.testing.assert_close(gradients("otr", case), wanted)


def test_one_token_rollouts_are_the_mean_over_sampled_tokens() -> None:
    """REINFORCE with the reward 1[token = shown] over all tokens, weighted by their probability: no samples needed."""
    case = tabular()
    log = case.distribution()  # (N, T, V)
    reward = torch.nn.functional.one_hot(case.tokens, log.shape[2]).double()
    expected = -(log.detach().exp() * reward * log).sum(2)
    (wanted,) = torch.autograd.grad(tok(expected, case), case.logits)
    torch.testing.assert_close(gradients("otr", case), wanted)


def test_kdrl() -> None:
    def formula(case: Tabular) -> Tensor:
        gap = case.logp() - case.decisions.extra["logp_teacher"]
        return tok(ppo(case, relative(case)) + 0.005 * 0.5 * gap**2, case)

    check_recipe("kdrl", formula)


def test_kdrl_limits() -> None:
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


def test_a_teacher_may_speak_only_where_the_policy_failed() -> None:
    case = tabular()
    failed = [{"name": "kl_to", "key": "logp_teacher", "kind": "k2", "failed": True}]
    gap = case.logp() - case.decisions.extra["logp_teacher"]
    wanted = tok(ppo(case, relative(case)) + 0.005 * 0.5 * gap**2 * (rewards(case) == 0)[:, None], case)
    loss = recipe_of("kdrl", regularizers=failed)
    found, _ = loss.loss(case.decisions, loss.advantage(case.decisions), case.logp())
    torch.testing.assert_close(found, wanted)


def nft(case: Tabular, *, weight: str) -> Tensor:
    d, value, group = case.decisions, rewards(case), case.decisions.need("group")
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


def test_nft() -> None:
    for distance in DISTANCES:
        check(recipe_of("nft", select=[]), tabular(drift=distance), lambda c: nft(c, weight="linear"))


def test_nft_on_policy_is_dr_grpo_or_grpo() -> None:
    case = tabular(drift=0.0)
    const = {"aggregate": "const", "length": 1000.0}
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


def test_a_lol() -> None:
    def formula(case: Tabular) -> Tensor:
        a, total = rewards(case) - 0.3, z(case).sum(1)
        return -(a * total.detach().exp().clamp(0.1, 1.9) * total).mean()

    for distance in DISTANCES:
        check(recipe_of("a_lol", select=[]), tabular(drift=distance), formula)


def test_a_lol_takes_what_is_better_than_the_reference_and_with_equal_weights_imitates_it() -> None:
    case = tabular()
    better = torch.nonzero(rewards(case) > 0.3).flatten().tolist()
    every = [{"name": "positive", "key": "mean_ref", "share": 1.0}]
    assert selected("a_lol", case.decisions, select=every) == better
    half = selected("a_lol", case.decisions)
    assert len(half) == len(better) // 2 and set(half) < set(better)
    plain = {"surrogate": "pg", "aggregate": "tok"}
    torch.testing.assert_close(
        gradients("a_lol", case, select=[], start={"name": "ones"}, advantage=[], estimator=plain),
        imitation(case),
    )


def test_divergence_imitation_fades_where_the_policy_has_left_the_reference() -> None:
    check_recipe("f_sft", lambda c: tok(softplus(-to_reference(c)) - math.log(2.0), c))
    case = tabular()
    kl = {"name": "divergence_imitation", "divergence": "reverse_kl"}
    torch.testing.assert_close(gradients("f_sft", case, objective=kl), gradients("sft", case))
    with pytest.raises(ValueError, match="Unknown divergence 'total_variation' to imitate by; known: chi_squared"):
        recipe_of("f_sft", objective={"name": "divergence_imitation", "divergence": "total_variation"})
