"""Tests of mask and reference recipes: selected rows and decisions, and penalties to a reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from formulas import DISTANCES, gradients, relative, tok, z
from tabular import Tabular, check, check_recipe, ppo, recipe_of, rewards, seq_mean, tabular
from torch import Tensor

from robopolicy.contrib.text_catalogue.masks import PredictedKL
from robopolicy.contrib.text_catalogue.references import average_weights
from robopolicy.core.decisions import Decisions
from robopolicy.text.generation import masked_log_softmax, top_p_support


def selected(name: str, case: Tabular, **changes) -> list[int]:
    return recipe_of(name, **changes).select(case.decisions, torch.Generator().manual_seed(0)).tolist()


def test_d3s_trains_on_the_highest_variance_rows_and_their_high_stake_decisions() -> None:
    """Selected rows keep the advantages of their whole groups, and only selected decisions count."""

    def formula(case: Tabular) -> Tensor:
        a, mask = relative(case), case.decisions.valid()
        rows = best[a[best].var(1, unbiased=False).argmax()]
        assert set(case.decisions.require("group")[rows].bincount().tolist()) != {2}
        kept = mask & torch.isin(torch.arange(16), rows)[:, None]
        stake = (a[:, None].abs() * case.decisions.require("entropy")).masked_fill(~kept, -1.0)
        keep = torch.zeros(mask.numel(), dtype=torch.bool)
        keep[stake.flatten().topk(int(0.8 * int(kept.sum()))).indices] = True
        return ppo(case, a)[keep.view_as(mask)].mean()

    best = torch.tensor(list(itertools.combinations(range(16), 8)))
    skewed_reward = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul(3).exp()
    check_recipe("d3s", formula, reward=skewed_reward)


def test_d3s_with_full_shares_equals_grpo() -> None:
    case, shares = tabular(), {"masks": [{"name": "high_variance_rows", "share": 1.0}, "informative"]}
    torch.testing.assert_close(gradients("d3s", case, estimator=shares), gradients("grpo", case, estimator={}))


def test_pf_ppo_without_selection_equals_token_mean_dr_grpo() -> None:
    for distance in DISTANCES:
        check(recipe_of("pf_ppo", select=[]), tabular(drift=distance), lambda c: tok(ppo(c, dr_grpo(c)), c))


def dr_grpo(case: Tabular) -> Tensor:
    return relative(case, scaled=False)


def test_pf_ppo_keeps_best_and_worst_rollouts_and_all_without_a_filter() -> None:
    case = tabular()
    value, chosen = rewards(case), selected("pf_ppo", case)
    for key in range(4):
        rows = [row for row in chosen if row // 4 == key]
        assert len(rows) == 2
        assert {float(value[row]) for row in rows} == {float(v) for v in value[4 * key : 4 * key + 4].unique()}
    assert selected("pf_ppo", case, select=[{"name": "extremes", "rest": 1.0}]) == list(range(16))


def test_self_keeps_only_prompts_with_low_base_policy_likelihood() -> None:
    case = tabular()
    assert selected("self", case) == [*range(4), *range(8, 12)]
    every = [{"name": "unlikely", "key": "likelihood", "below": 1.0}]
    assert selected("self", case, select=every) == list(range(16))
    check(recipe_of("self", select=every), case, grpo)


def grpo(case: Tabular) -> Tensor:
    return seq_mean(ppo(case, relative(case)), case.decisions.valid())


def test_capo_drops_decisions_with_predicted_kl_above_the_limit() -> None:
    def formula(case: Tabular) -> Tensor:
        """Divergence d'Fd / 2 after a step along the gradient d of A log pi in the logits."""
        d, a = case.decisions, relative(case)[:, None]
        step = a[:, :, None] * (torch.nn.functional.one_hot(case.tokens, old.shape[2]).double() - old)
        fisher = torch.diag_embed(old) - old[..., :, None] * old[..., None, :]
        shift = 0.5 * torch.einsum("nti,ntij,ntj->nt", step, fisher, step)
        keep = d.valid() & (shift <= limit)
        assert 0.9 * int(d.valid().sum()) <= int(keep.sum()) < int(d.valid().sum())
        return ppo(case, relative(case))[keep].mean()

    old = tabular(drift=0.0).distribution().detach().exp()
    extra = {"collision": old.square().sum(2), "collision3": old.pow(3).sum(2)}
    limit = 0.24
    recipe = recipe_of("capo", estimator={"masks": [{"name": "predicted_kl", "shift": limit}]})
    for drift in (0.0, 0.3):
        check(recipe, tabular(drift=drift, extra=extra), formula)
    case = tabular(extra=extra)
    torch.testing.assert_close(
        gradients("capo", case, estimator={"masks": ["predicted_kl"]}), gradients("grpo", case, estimator={})
    )


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_predicted_kl_is_accurate_to_second_order(sign: float) -> None:
    generator, rate = torch.Generator().manual_seed(0), 0.03
    logits = torch.randn(4, 3, 5, generator=generator, dtype=torch.float64)
    logp, tokens = logits.log_softmax(2), torch.randint(5, (4, 3, 1), generator=generator)
    p, chosen = logp.exp(), logp.gather(2, tokens)[..., 0]
    advantage = sign * (0.5 + torch.rand(4, 3, generator=generator, dtype=torch.float64))
    extra = {"collision": p.square().sum(2), "collision3": p.pow(3).sum(2)}
    rows = Decisions(chosen, extra=extra)
    step = rate * advantage[..., None] * (torch.nn.functional.one_hot(tokens[..., 0], 5) - p)
    to_device = (logits + step).log_softmax(2)
    shift = (p * (logp - to_device)).sum(2)
    gain = advantage * (to_device.gather(2, tokens)[..., 0] - chosen)
    for option, exact, above in (("shift", shift, True), ("gain", gain, False)):
        limit = float(exact.median())
        clear = (exact / limit - 1).abs() > 0.02
        kept = PredictedKL(rate=rate, **{option: limit})(rows, advantage, torch.zeros(4, 3))
        assert clear.sum() >= 9
        assert torch.equal(kept[clear], (exact < limit)[clear] if above else (exact > limit)[clear])


def test_the_share_limit_drops_the_decisions_with_the_largest_predicted_kl() -> None:
    case = tabular()
    p = case.distribution().detach().exp()
    rows = case.decisions.with_fields(
        extra={**case.decisions.extra, "collision": p.square().sum(2), "collision3": p.pow(3).sum(2)}
    )
    advantage, valid = torch.randn(16, 6, dtype=torch.float64), case.decisions.valid()
    kept = PredictedKL(shift=0.0, share=0.1)(rows, advantage, torch.zeros(16, 6))
    assert int((~kept).sum()) == int(0.1 * int(valid.sum())) > 1
    for limit in (0.01, 0.05, 0.1):
        larger = ~PredictedKL(shift=limit)(rows, advantage, advantage) & valid
        assert int((~kept & larger).sum()) == min(int((~kept).sum()), int(larger.sum())) > 0


def test_nlpo_with_full_support_equals_ppo() -> None:
    case = tabular(drift=0.0)
    support = top_p_support(case.logits.detach(), 1.0)
    assert bool(support.all())
    free = {"kl": {"name": "anneal", "start": 0.0, "end": 0.0, "steps": 1}}
    torch.testing.assert_close(gradients("nlpo", case, controllers=free), gradients("ppo", case))


def test_the_nlpo_controller_counts_trajectories() -> None:
    case, recipe = tabular(), recipe_of("nlpo")
    two_rows_each = case.decisions.with_fields(trajectory=torch.arange(16) // 2)
    for decisions, count in ((case.decisions, 16), (two_rows_each, 8)):
        before = recipe.estimator.controllers["kl"].value
        recipe.observe(decisions, {"kl_ref": torch.tensor(9.0)})
        after = recipe.estimator.controllers["kl"].value
        assert after == pytest.approx(before * (1.0 + 0.2 * count / 10000), rel=1e-9)


def test_nlpo_and_shioenv_score_with_the_restricted_policy() -> None:
    """Tokens outside the support get no gradient, and the ratio uses the restricted policies."""
    case = tabular()
    support = torch.ones(4, 6, 5, dtype=torch.bool)
    support[:, :, 4] = False
    used = case.decisions.valid() & (case.tokens != 4)
    old = case.logits.detach() + 0.1

    def score(table: Tensor) -> Tensor:
        scores = masked_log_softmax(table, support)[case.state].gather(2, case.tokens.unsqueeze(2)).squeeze(2)
        return scores.masked_fill(~used, 0.0)

    chosen = case.decisions.with_fields(logp_old=score(old), mask=used)
    for name in ("nlpo", "shioenv"):
        recipe = recipe_of(name)
        loss, info = recipe.loss(chosen, recipe.advantage(chosen), score(case.logits))
        (gradient,) = torch.autograd.grad(loss, case.logits)
        assert bool((gradient[:, :, 4] == 0).all()) and bool((gradient[:, :, :4] != 0).any())
        assert info["ratio_mean"].item() == pytest.approx(1.0)


def test_a2p_failures_train_only_the_blamed_unit() -> None:
    blamed = torch.tensor([0, 1, -1, 0]).repeat(4)

    def formula(case: Tabular) -> Tensor:
        losses = ppo(case, relative(case))
        rows = []
        for row in range(16):
            keep = case.decisions.valid()[row].clone()
            if rewards(case)[row] == 0 and blamed[row] >= 0:
                keep &= case.decisions.require("unit")[row] == blamed[row]
            rows.append(losses[row][keep])
        return torch.cat(rows).mean()

    check_recipe("a2p", formula, extra={"blamed_unit": blamed})
    without_blame = tabular(extra={"blamed_unit": torch.full((16,), -1)})
    torch.testing.assert_close(gradients("a2p", without_blame), gradients("grpo", without_blame, estimator={}))


def test_adacot_masks_the_gate_decision_from_the_loss() -> None:
    def formula(case: Tabular) -> Tensor:
        keep = case.decisions.valid() & ~case.decisions.extra["gate"]
        return ppo(case, relative(case))[keep].mean()

    check_recipe("adacot", formula)
    case = tabular()
    gradient = gradients("adacot", case)
    assert bool((gradient[:, 0] == 0).all()) and bool((gradient[:, 1:] != 0).any())  # position 0 is the gate
    none = case.decisions.with_fields(extra={"gate": torch.zeros(16, 6, dtype=torch.bool)})
    torch.testing.assert_close(
        gradients("adacot", Tabular(none, case.tokens, case.logits)), gradients("grpo", case, estimator={})
    )


def test_trajectory_selection_keeps_short_successes_and_long_failures() -> None:
    case = tabular()
    contrast = [{"name": "contrast", "keep": 2}]
    chosen = selected("trajectory_selection", case, select=contrast)
    value, length = rewards(case), case.decisions.valid().sum(1)
    for key in range(4):
        rows = [row for row in range(16) if row // 4 == key]
        order = sorted(rows, key=lambda row: (float(value[row]), -int(length[row])))
        kept = [row for row in chosen if row in rows]
        worst, best = order[0], order[-1]
        assert {(float(value[row]), int(length[row])) for row in kept} == {
            (float(value[row]), int(length[row])) for row in (worst, best)
        }
    assert selected("trajectory_selection", case) == list(range(16))  # keeps 4 of 4
    check(recipe_of("trajectory_selection"), case, grpo)


def test_distribution_dcpo_equals_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        d, value = case.decisions, rewards(case)
        level = d.require("entropy")[d.valid()].mean()
        strength = min(abs(0.5 - level.item()), 0.1) / (value > 0.05).double().mean()
        share = strength / (1 + strength)
        other = d.extra["logp_warm"] if level <= 0.5 else d.extra["logp_cool"]
        a = (1 - share) * relative(case)[:, None] + share * (value > 0.05).double()[:, None] * (
            other - d.logp_old
        ).exp()
        clipped = -torch.minimum(z(case).exp() * a, z(case).exp().clamp(0.8, 1.2) * a)
        return tok(torch.where(a < 0, torch.minimum(clipped, -3 * a), clipped), case)

    check_recipe("distribution_dcpo", formula)
    low = torch.full((16, 6), 0.3, dtype=torch.float64)
    check(recipe_of("distribution_dcpo"), tabular(entropy=low), formula)


def test_distribution_dcpo_without_strength_equals_dual_clip_grpo() -> None:
    case = tabular()
    stages = [*recipe_of("grpo").plain["advantage"], {"name": "tempered_target", "most": 0.0}]
    torch.testing.assert_close(
        gradients("distribution_dcpo", case, advantage=stages),
        gradients("grpo", case, estimator={"surrogate": "dual_clip"}),
    )


def test_salsa_equals_grpo_plus_reference_kl() -> None:
    def formula(case: Tabular) -> Tensor:
        change = (case.logp() - case.decisions.require("logp_ref")).masked_fill(~case.decisions.valid(), 0.0)
        return seq_mean(ppo(case, relative(case)) + 0.05 * ((-change).exp() - 1 + change), case.decisions.valid())

    check_recipe("salsa", formula)


def test_average_of_identical_weights_equals_those_weights() -> None:
    state = {"weight": torch.randn(3, 2), "steps": torch.tensor(7)}
    mixed = average_weights([state, state], [0.3, 0.7])
    torch.testing.assert_close(mixed["weight"], state["weight"])
    assert mixed["steps"] == 7


def test_rpo_equals_dpo_plus_weighted_imitation() -> None:
    def formula(case: Tabular) -> Tensor:
        value, group = rewards(case), case.decisions.require("group")
        score = (case.logp() - case.decisions.require("logp_ref")).masked_fill(~case.decisions.valid(), 0.0).sum(1)
        pairs, best = [], torch.zeros(16, dtype=torch.bool)
        for i in range(16):
            for j in range(16):
                if group[i] == group[j] and value[i] > value[j]:
                    pairs.append(-torch.nn.functional.logsigmoid(0.01 * (score[i] - score[j])))
                    best[i] = True
        imitated = -case.logp()[best[:, None] & case.decisions.valid()].mean()
        return torch.stack(pairs).mean() + 0.005 * imitated

    check_recipe("rpo", formula)
    case = tabular()
    torch.testing.assert_close(
        gradients("rpo", case, regularizers=[{"name": "imitation", "rows": "best", "coef": 0.0}]),
        gradients("dpo", case, objective={"name": "direct_preference", "beta": 0.01}),
    )
