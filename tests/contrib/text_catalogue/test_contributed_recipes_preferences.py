"""Tests of preference recipes against their written formulas and simpler limits."""

from __future__ import annotations

import pytest
import torch
from formulas import gradients, pairs, to_reference, tok, z
from tabular import PROMPTS, Tabular, check, check_recipe, ppo, recipe_of, rewards, tabular
from torch import Tensor
from torch.nn.functional import logsigmoid

from robopolicy.contrib.text_catalogue import pair_objectives as objectives
from robopolicy.contrib.text_catalogue.pair_objectives import self_test_pair
from robopolicy.contrib.text_catalogue.targets import DIVERGENCES


def mean(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).mean()


def p3o(case: Tabular, group_pairs: list[tuple[int, int]]) -> Tensor:
    """Half the difference of the shaped rewards times the difference of the log-probabilities."""
    d = case.decisions
    penalty = (d.logp_old - d.require("logp_ref")).masked_fill(~d.valid(), 0.0).sum(1)
    r, log = rewards(case) - 0.1 * penalty, z(case).sum(1)
    return -mean([0.5 * (r[i] - r[j]) * (log[i] - log[j]) for i, j in group_pairs])


def test_p3o_on_policy_gradient_equals_the_pairwise_gradient() -> None:
    case = tabular(drift=0.0)
    (target,) = torch.autograd.grad(p3o(case, pairs(case, ordered=False)), case.logits)
    torch.testing.assert_close(gradients("p3o", case), target)


def test_p3o_equals_the_clipped_loss_with_a_leave_one_out_baseline() -> None:
    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        penalty = (d.logp_old - d.require("logp_ref")).masked_fill(~d.valid(), 0.0).sum(1)
        r, ratio, group = rewards(case) - 0.1 * penalty, z(case).sum(1).exp(), d.require("group")
        rows = []
        for i in range(len(r)):
            others = (group == group[i]) & (torch.arange(len(r)) != i)
            a = r[i] - r[others].mean()
            rows.append(-torch.minimum(ratio[i] * a, ratio[i].clamp(0.8, 1.2) * a))
        return mean(rows)

    check_recipe("p3o", formula)
    case, shift = tabular(), torch.arange(PROMPTS, dtype=torch.float64)
    last = case.decisions.require("reward")
    row_shift = torch.zeros_like(last)
    row_shift[:, 0] = shift[case.decisions.require("group")]
    to_device = Tabular(
        case.decisions.with_fields(reward=last + row_shift * case.decisions.valid()), case.tokens, case.logits
    )
    moved_rows = case.decisions.valid()[:, 0]
    assert bool(moved_rows.all())
    torch.testing.assert_close(gradients("p3o", to_device), gradients("p3o", case))


def copg(case: Tabular, beta: float = 0.1) -> Tensor:
    r = rewards(case) - beta * to_reference(case).sum(1)
    group = case.decisions.require("group")
    size = (group == 0).sum()
    return mean(
        [
            sum((r[i] - r[j]) ** 2 for i, j in pairs(case, ordered=False) if i == row) / (size - 1) / 2
            for row in range(16)
        ]
    )


def test_copg_matches_its_written_formula() -> None:
    check_recipe("copg", copg)


def test_copg_gradient_equals_the_scaled_rloo_gradient_off_policy() -> None:
    """-2 beta / N sum_i (R_i - mean of the others) grad log pi; ordered pairs count twice with factor one half."""
    case = tabular(drift=0.5)
    r = (rewards(case) - 0.1 * to_reference(case).sum(1)).detach()
    group = case.decisions.require("group")
    loo = torch.stack([r[i] - r[(group == group[i]) & (torch.arange(16) != i)].mean() for i in range(16)])
    (target,) = torch.autograd.grad(-2 * 0.1 * (loo * to_reference(case).sum(1)).mean(), case.logits)
    torch.testing.assert_close(gradients("copg", case), target)


def test_copg_loss_is_zero_at_the_optimal_policy() -> None:
    case = tabular()
    ideal = case.decisions.require("logp_ref").clone()
    ideal[:, 0] += rewards(case) / 0.1
    loss, _ = recipe_of("copg").loss(case.decisions, rewards(case)[:, None], ideal)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)


def wins(case: Tabular) -> Tensor:
    value, group = rewards(case), case.decisions.require("group")
    rates = []
    for i in range(len(value)):
        others = value[(group == group[i]) & (torch.arange(len(value)) != i)]
        rates.append(((value[i] > others).double() + 0.5 * (value[i] == others).double()).mean())
    return torch.stack(rates)


def test_dno_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        log, rate = z(case).sum(1), wins(case)
        terms = []
        for i, j in pairs(case, ordered=False):
            q, margin = torch.sigmoid(rate[i] - rate[j]), 0.1 * (log[i] - log[j])
            terms.append(-q * logsigmoid(margin) - (1 - q) * logsigmoid(-margin))
        return mean(terms)

    check_recipe("dno", formula)


def test_dno_with_hard_preferences_equals_dpo_against_the_previous_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs, their scores and the logistic loss equal DPO; only the target is soft."""
    won = (torch.arange(8) % 2 == 0).double()[:, None]  # one of the two rollouts of a prompt is right
    fields = {"rollouts": 2, "reward": won * (torch.arange(6) == 0), "mask": torch.ones(8, 6, dtype=torch.bool)}
    case = tabular(**fields)
    against_previous = Tabular(case.decisions.with_fields(logp_ref=case.decisions.logp_old), case.tokens, case.logits)
    target = gradients("dpo", against_previous)
    assert not torch.allclose(gradients("dno", case), target)
    monkeypatch.setattr(objectives, "win_rate", lambda decisions, advantage: 1e3 * advantage)  # q is 0 or 1
    torch.testing.assert_close(gradients("dno", case), target)


def test_nash_mp_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        pull = to_reference(case).sum(1).detach()
        total = case.logp().masked_fill(~case.decisions.valid(), 0.0).sum(1)
        return ((0.1 * pull - (wins(case) - 0.5)) * total).mean()

    check_recipe("nash_mp", formula)


def test_nash_mp_with_equal_rewards_only_regularizes_to_the_reference() -> None:
    case = tabular(reward=torch.zeros(16, 6, dtype=torch.float64))
    (target,) = torch.autograd.grad(0.1 * 0.5 * to_reference(case).sum(1).square().mean(), case.logits)
    torch.testing.assert_close(gradients("nash_mp", case), target)


def test_cpl_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        s = case.logp().masked_fill(~case.decisions.valid(), 0.0).sum(1)
        contrast = mean([-logsigmoid(0.1 * (s[i] - 0.5 * s[j])) for i, j in pairs(case, ordered=True)])
        return contrast - 0.1 * case.logp()[case.decisions.valid()].mean()

    check_recipe("cpl", formula)


def test_cpl_without_penalty_equals_reference_free_dpo_and_supports_a_discount() -> None:
    case = tabular()
    flat = Tabular(
        case.decisions.with_fields(logp_ref=torch.zeros(16, 6, dtype=torch.float64)), case.tokens, case.logits
    )
    full = {"name": "contrastive", "penalty": 1.0}
    torch.testing.assert_close(gradients("cpl", case, objective=full, regularizers=[]), gradients("dpo", flat))
    discounted = {"name": "contrastive", "penalty": 1.0, "gamma": 0.5}
    factor = torch.pow(0.5, case.decisions.require("unit").double())
    s = (factor * case.logp()).masked_fill(~case.decisions.valid(), 0.0).sum(1)
    loss = mean([-logsigmoid(0.1 * (s[i] - s[j])) for i, j in pairs(case, ordered=True)])
    (target,) = torch.autograd.grad(loss, case.logits)
    torch.testing.assert_close(gradients("cpl", case, objective=discounted, regularizers=[]), target)


def slope_of(name: str, t: Tensor) -> Tensor:
    """f'(t) by autograd from f itself."""
    leaf = t.clone().requires_grad_()
    f = {
        "reverse_kl": lambda t: t * t.log(),
        "forward_kl": lambda t: -t.log(),
        "jensen_shannon": lambda t: t * (2 * t / (t + 1)).log() + (2 / (t + 1)).log(),
        "total_variation": lambda t: 0.5 * (t - 1).abs(),
        "chi_squared": lambda t: t + 1 / t,
    }[name]
    (gradient,) = torch.autograd.grad(f(leaf).sum(), leaf)
    return gradient


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_divergence_slopes_equal_the_autograd_derivatives(name: str) -> None:
    t = torch.tensor([0.1, 0.5, 0.9, 1.5, 4.0], dtype=torch.float64)
    torch.testing.assert_close(DIVERGENCES[name](t.log()), slope_of(name, t))


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_f_dpg_matches_its_formula_for_every_divergence(name: str) -> None:
    def formula(case: Tabular) -> Tensor:
        d, group = case.decisions, case.decisions.require("group")
        change = (d.logp_old - d.require("logp_ref")).masked_fill(~d.valid(), 0.0).sum(1)
        tilt = (rewards(case) / 0.1 - change).exp()
        z_of = torch.stack([tilt[group == key].mean() for key in group])
        log_t = (z_of / tilt).log().clamp(-20.0, 20.0)
        a = -DIVERGENCES[name](log_t)
        a = a - torch.stack([a[group == key].mean() for key in group])
        return -(a * z(case).sum(1).exp()).mean()

    stages = [{"name": "target_divergence", "divergence": name, "beta": 0.1}, recipe_of("grpo").plain["advantage"][0]]
    for distance in (0.0, 0.3):
        check(recipe_of("f_dpg", advantage=stages), tabular(drift=distance), formula)
    if name == recipe_of("f_dpg").plain["advantage"][0]["divergence"]:
        check_recipe("f_dpg", formula)


def test_f_dpg_with_reverse_kl_equals_the_reward_minus_a_reference_penalty() -> None:
    case = tabular(drift=0.0)
    mean_stage = recipe_of("grpo").plain["advantage"][0]
    reverse = [{"name": "target_divergence", "divergence": "reverse_kl", "beta": 0.5}, mean_stage]
    shaped = [{"name": "shape", "bonus": {"name": "reference_penalty", "coef": 0.5}}, mean_stage]
    torch.testing.assert_close(
        0.5 * gradients("f_dpg", case, advantage=reverse), gradients("f_dpg", case, advantage=shaped)
    )


def test_gepo_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        mask, value, group = case.decisions.valid(), rewards(case), case.decisions.require("group")
        every = value[:, None].expand(mask.shape)[mask]
        a = (value - every.mean()) / (every.std() + 1e-6)
        r, terms = to_reference(case).sum(1), []
        for key in group.unique():
            won, invalid = (group == key) & (value > 0), (group == key) & (value == 0)
            if won.any() and invalid.any():
                terms.append(-logsigmoid(0.1 * (r[won].mean() - r[invalid].mean())) + r[won].var(unbiased=False))
        return tok(ppo(case, a), case) + 0.01 * mean(terms)

    check_recipe("gepo", formula)


def test_gepo_preference_of_one_success_and_one_failure_equals_dpo() -> None:
    case = tabular()
    value, group = rewards(case), case.decisions.require("group")
    rows: list[int] = []
    for key in group.unique():
        won, invalid = ((group == key) & (value == outcome) for outcome in (1.0, 0.0))
        if won.any() and invalid.any():
            rows += [int(won.nonzero()[0]), int(invalid.nonzero()[0])]
    small = case.decisions.select(torch.tensor(rows))
    losses = [
        recipe_of("dpo", objective={"name": name, "beta": 0.1}).loss(small, value[rows, None], case.logp()[rows])[0]
        for name in ("set_preference", "direct_preference")
    ]
    torch.testing.assert_close(losses[0], losses[1])


def test_direct_advantage_matches_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        d, change, terms = case.decisions, to_reference(case), []
        gain = d.extra["step_advantage"].masked_fill(~d.valid(), 0.0)
        for row in range(len(d)):
            for unit in range(2):
                keep = d.valid()[row] & (d.require("unit")[row] == unit)
                if keep.any():
                    terms.append((0.1 * change[row][keep].sum() - gain[row][keep].mean()) ** 2)
        return mean(terms)

    check_recipe("direct_advantage", formula)


def test_direct_advantage_loss_is_zero_at_the_tilted_reference() -> None:
    case = tabular()
    case = Tabular(case.decisions.with_fields(unit=case.decisions.depths()), case.tokens, case.logits)  # tokens
    gain = case.decisions.extra["step_advantage"]
    ideal = (case.decisions.require("logp_ref") + gain / 0.1).requires_grad_()
    recipe = recipe_of("direct_advantage")
    loss, _ = recipe.loss(case.decisions, recipe.advantage(case.decisions), ideal)
    (gradient,) = torch.autograd.grad(loss, ideal)
    assert loss.item() == pytest.approx(0.0, abs=1e-12) and gradient.abs().max().item() < 1e-6


def test_a_star_po_regresses_the_log_ratio_of_the_trajectory() -> None:
    """This includes trajectories with several turns."""

    def formula(case: Tabular) -> Tensor:
        return ((0.001 * to_reference(case).sum(1) - (rewards(case) - 0.3)) ** 2).mean()

    check_recipe("a_star_po", formula)
    check_recipe("a_star_po", formula, unit=None)
    with pytest.raises(ValueError, match="Level must be one of unit, trajectory, got 'turn'"):
        recipe_of("a_star_po", objective={"name": "step_regression", "level": "turn"})


def test_lspo_compares_clusters_by_their_mean_reward() -> None:
    def formula(case: Tabular) -> Tensor:
        cluster, value, group = case.decisions.extra["cluster"], rewards(case), case.decisions.require("group")
        means = torch.stack([value[cluster == key].mean() for key in cluster])
        r = to_reference(case).sum(1)
        better = [(i, j) for i in range(16) for j in range(16) if group[i] == group[j] and means[i] > means[j] + 1e-9]
        return mean([-logsigmoid(0.1 * (r[i] - r[j])) for i, j in better])

    check_recipe("lspo", formula)


def test_lspo_with_one_cluster_has_zero_gradient() -> None:
    case = tabular(extra={"cluster": torch.zeros(16, dtype=torch.long)})
    assert bool((gradients("lspo", case) == 0).all())


def test_seppo_suppresses_or_imitates_the_sample_by_the_anchor_test() -> None:
    seen: set[bool] = set()

    def formula(case: Tabular) -> Tensor:
        r, terms = to_reference(case).sum(1), []
        for shown, sample in pairs(case, ordered=True):
            pushed = bool(r[sample] > r[shown])
            seen.add(pushed)
            terms.append(-logsigmoid(0.1 * (r[shown] - r[sample] if pushed else r[shown] + r[sample])))
        return mean(terms)

    check_recipe("seppo", formula)
    check_recipe("seppo", formula, source=torch.ones(4 * PROMPTS, dtype=torch.long))  # all from a file
    assert seen == {True, False}


def test_self_test_pair_selects_the_most_and_least_passing_programs() -> None:
    passes = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    assert self_test_pair(passes) == (2, 1, 1)  # both tests separate them; two pass test 1, one passes test 2
    assert self_test_pair(torch.tensor([[1], [0], [1]]).bool()) == (0, 1, 0)  # one test: pass against fail
    assert self_test_pair(torch.ones(3, 2).bool()) is None


def test_oppo_loss_equals_hindsight_imitation_plus_a_triplet_loss() -> None:
    generator = torch.Generator().manual_seed(5)
    embedding, best = (torch.randn(n, 3, generator=generator, dtype=torch.float64).requires_grad_() for n in (16, 1))
    case = tabular(extra={"embedding": embedding, "best": best.expand(16, 3)})
    recipe = recipe_of("oppo")
    loss, _ = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    triplets = []
    for i, j in pairs(case, ordered=True):
        near, far = ((best[0] - embedding[row]).square().sum() for row in (i, j))
        triplets.append((near - far + 1).clamp(min=0))
    written = 0.1 * (mean(triplets) + (embedding.norm(dim=1) - 1).square().mean()) - tok(case.logp(), case)
    leaves = (case.logits, embedding, best)
    torch.testing.assert_close(loss, written)
    for found, target in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(written, leaves), strict=True):
        torch.testing.assert_close(found, target)
    with torch.no_grad():
        embedding[3] = 0.0  # the norm has no gradient at 0
    loss, _ = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())
    assert all(bool(found.isfinite().all()) for found in torch.autograd.grad(loss, leaves))
    alone = {"name": "embedding_triplet", "coef": 0.0}
    torch.testing.assert_close(gradients("oppo", case, objective=alone), gradients("sft", case))


def test_dstc_has_the_loss_of_dpo() -> None:
    case = tabular()
    losses = []
    for name in ("dstc", "dpo"):
        recipe = recipe_of(name)
        losses.append(recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp())[0])
    torch.testing.assert_close(*losses)
