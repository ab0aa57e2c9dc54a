"""Tests of advantage recipes against their written formulas or limiting cases."""

from __future__ import annotations

import math

import pytest
import torch
from tabular import Tabular, check_recipe, ppo, recipe_of, rewards, seq_mean, standardised, tabular
from torch import Tensor

from robopolicy.contrib.text_catalogue.comparisons import BetaScale, ImprovementBaseline, SplitBaseline
from robopolicy.contrib.text_catalogue.factors import AttentionRhythm, attention_distance, future_attention, potential
from robopolicy.contrib.text_catalogue.probe_baselines import RidgeProbe
from robopolicy.contrib.text_catalogue.windows import cat
from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import Decisions
from robopolicy.recipe_files import read_recipe


def groups(case: Tabular) -> Tensor:
    return case.decisions.require("group")


def grpo(case: Tabular) -> Tensor:
    return standardised(rewards(case), groups(case))


def group_mean(values: Tensor, group: Tensor) -> Tensor:
    return torch.stack([values[group == key].mean() for key in group])


def episodes(reward: list[float], group: list[int], length: int = 1, **fields: Tensor) -> Decisions:
    """Rollouts of one row each, with their outcome at the first decision."""
    placed = torch.zeros(len(reward), length, dtype=torch.float64)
    placed[:, 0] = torch.tensor(reward)
    return Decisions(torch.zeros_like(placed), reward=placed, group=torch.tensor(group), **fields)


def dual(case: Tabular, advantage: Tensor, cap: float = 10.0) -> Tensor:
    loss = ppo(case, advantage, 0.2, 0.28)
    advantage = advantage.unsqueeze(1) if advantage.dim() == 1 else advantage
    return torch.where(advantage < 0, torch.minimum(loss, -cap * advantage), loss)


def test_bnpo_equals_its_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        rate = group_mean(rewards(case), groups(case))
        each = rate[::4]  # one per group
        spread = each.mean() * (1 - each.mean()) / each.var() - 1
        a, b = ((1 + spread * side / 3).clamp(min=1.0) for side in (each.mean(), 1 - each.mean()))
        density = torch.distributions.Beta(a, b, validate_args=False).log_prob(rate).exp()
        advantage = (rewards(case) - rate) * (1 / density).clamp(max=1e6)
        return (dual(case, advantage) * case.decisions.valid()).sum(1).mean()

    check_recipe("bnpo", formula)


def test_bnpo_scale_limits_are_one_and_the_inverse_deviation() -> None:
    """Both parameters 1: no scaling. Both 3/2: pi / 8 divided by the population deviation."""
    flat = episodes([1, 0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0], [0] * 4 + [1] * 4 + [2] * 4)  # rates 1/2, 1, 0: v = 1/4
    advantage = torch.tensor([[0.5], [-0.5]] * 6, dtype=torch.float64)
    torch.testing.assert_close(BetaScale()(advantage, flat)[:4], advantage[:4])
    # rates m +- s with mean 1/2 and variance 1/16 give a = b = 3/2
    s = math.sqrt(0.5 * 0.0625)
    bell = episodes([0.5 - s] * 2 + [0.5 + s] * 2, [0, 0, 1, 1])
    scaled = BetaScale()(torch.ones(4, 1, dtype=torch.float64), bell)
    expected = math.pi / 8 / math.sqrt((0.5 - s) * (0.5 + s))
    torch.testing.assert_close(scaled, torch.full((4, 1), expected, dtype=torch.float64))


def test_poise_with_a_perfect_probe_equals_rloo_and_ignores_its_own_prediction() -> None:
    case, recipe = tabular(), recipe_of("poise")
    stage = recipe.pipeline.stages[0]
    stage.probe.predict = lambda features: features[:, 0]
    reward = rewards(case)
    exact = case.decisions.with_fields(extra={"features": reward.unsqueeze(1)})
    torch.testing.assert_close(recipe.advantage(exact), recipe_of("rloo").advantage(case.decisions))
    to_device = reward.unsqueeze(1).clone()
    to_device[5] += 100.0
    changed = recipe.advantage(case.decisions.with_fields(extra={"features": to_device})) != recipe.advantage(exact)
    assert not bool(changed[5]) and bool(changed[4] & changed[6] & changed[7])


def test_ridge_probe_recovers_a_linear_rule_and_restores_its_state() -> None:
    features = torch.randn(200, 5, dtype=torch.float64)
    rule = torch.tensor([1.0, -2.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    probe, again = RidgeProbe(components=5, ridge=1e-6), RidgeProbe(components=5, ridge=1e-6)
    assert bool((probe.predict(features) == 0).all())
    probe.observe(features, features @ rule + 0.3)
    again.load_state_dict(probe.state_dict())
    new = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(probe.predict(new), new @ rule + 0.3, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(again.predict(new), probe.predict(new))
    probe.observe(torch.randn(5000, 5), torch.zeros(5000))
    assert len(probe.features) == 4096  # the oldest are dropped


def test_v0_baseline_is_the_batch_mean_for_equal_prompts_and_the_prior_for_far_ones() -> None:
    recipe = recipe_of("v0", advantage=recipe_of("v0").plain["advantage"][:1])
    near = episodes([1, 1, 1, 0], [0, 1, 2, 3], extra={"prompt_features": torch.zeros(4, 2, dtype=torch.float64)})
    torch.testing.assert_close(recipe.advantage(near)[:, 0], torch.tensor([0.5, 0.5, 0.5, -0.5], dtype=torch.float64))
    recipe.observe(near, {})
    expected = torch.tensor([1, 1, 1, 0]) - torch.tensor((3 + 0.5) / 5, dtype=torch.float64)
    torch.testing.assert_close(recipe.advantage(near)[:, 0], expected)
    far = near.with_fields(extra={"prompt_features": torch.full((4, 2), 100.0, dtype=torch.float64)})
    torch.testing.assert_close(recipe.advantage(far)[:, 0], torch.tensor([0.5, 0.5, 0.5, -0.5], dtype=torch.float64))


def test_segment_spo_advantages_are_value_changes_and_telescope() -> None:
    def formula(case: Tabular) -> Tensor:
        d, advantage = case.decisions, torch.zeros_like(case.decisions.logp_old)
        for row, keep in enumerate(d.valid()):
            units = [u for u in (0, 1) if bool((keep & (d.unit[row] == u)).any())]
            values = [float(d.value[row][keep & (d.unit[row] == u)][0]) for u in units] + [0.0]
            for i, u in enumerate(units):
                inside = keep & (d.unit[row] == u)
                advantage[row, inside] = d.reward[row][inside].sum() + values[i + 1] - values[i]
        chosen = d.valid() & (d.logp_old < math.log(0.9))
        return ppo(case, advantage)[chosen].mean()

    check_recipe("segment_spo", formula)
    case, recipe = tabular(), recipe_of("segment_spo", advantage_source={"name": "gae", "gamma": 1.0, "lam": 0.0})
    each = recipe.advantage(case.decisions)  # cut everywhere: a value per token; the sum is R - V_0
    first = torch.stack(
        [value[keep][0] for value, keep in zip(case.decisions.value, case.decisions.valid(), strict=True)]
    )
    torch.testing.assert_close(each.sum(1), rewards(case) - first)


def test_tempo_adds_the_value_change_where_rollouts_diverge() -> None:
    tokens = torch.tensor([[1, 1, 1], [1, 1, 2], [1, 2, 1], [1, 2, 1]])
    case = episodes([1, 0, 1, 1], [0, 0, 0, 0], 3, extra={"chosen": tokens})
    found = recipe_of("tempo").advantage(case)
    base = recipe_of("grpo").advantage(case)
    gain = torch.tensor([[0, -0.25, 0.5], [0, -0.25, -0.5], [0, 0.25, 0], [0, 0.25, 0]], dtype=torch.float64)
    torch.testing.assert_close(found, base + gain)
    alone = torch.arange(12).view(4, 3)  # no shared prefix: only the first decision has the term
    gain = recipe_of("tempo").advantage(case.with_fields(extra={"chosen": alone})) - base
    torch.testing.assert_close(gain[:, 0], torch.tensor([0.25, -0.75, 0.25, 0.25], dtype=torch.float64))
    assert float(gain[:, 1:].abs().max()) == 0.0


def test_canon_baseline_compares_the_high_and_low_entropy_halves() -> None:
    entropy = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    case = episodes([1, 0, 0, 1], [0, 0, 0, 0], entropy=entropy)
    raw = outcome(case)
    found = SplitBaseline(inter=1.0, alpha=0.9, beta=0.1)(raw, case)[:, 0].tolist()
    assert found == pytest.approx([0.9 - 0.5 - 0.1, -0.5 - 0.1, 0 - 0.45 + 0.1, 1 - 0.45 + 0.1])
    within = SplitBaseline(inter=0.0)(raw, case)[:, 0].tolist()
    assert within == pytest.approx([0.5, -0.5, -0.5, 0.5])
    even = SplitBaseline(inter=0.5)(raw, case)
    torch.testing.assert_close(even, recipe_of("dr_grpo").advantage(case))
    tied = case.with_fields(entropy=torch.ones_like(entropy))  # halves by order
    assert SplitBaseline()(raw, tied)[:, 0].tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])
    lone = case.with_fields(group=torch.arange(4))  # no other half
    assert float(SplitBaseline()(raw, lone).abs().max()) == 0.0
    length = recipe_of("canon").plain["estimator"]["length"]
    assert length == 8192.0


def test_adora_downweights_groups_whose_successes_are_not_the_longest() -> None:
    mask = torch.arange(4) < torch.tensor([2, 4, 4, 2, 4, 2, 2, 2]).unsqueeze(1)
    case = episodes([1, 0, 1, 0, 1, 0, 0.5, 0], [0, 0, 1, 1, 2, 2, 3, 3], 4, mask=mask)
    found, base = (recipe_of(name).advantage(case)[:, 0] for name in ("adora", "grpo"))
    torch.testing.assert_close(found, base * torch.tensor([0.1, 0.1, 1, 1, 1, 1, 0.1, 0.1], dtype=torch.float64))
    plain = recipe_of("adora").plain["advantage"][:2]
    torch.testing.assert_close(recipe_of("adora", advantage=plain).advantage(case)[:, 0], base)


def test_copo_advantage_is_local_for_differing_answers_and_global_for_equal_ones() -> None:
    same = torch.zeros(8, dtype=torch.long)
    case = episodes([1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1], extra={"answer": same})
    found = recipe_of("copo").advantage(case)[:, 0]  # tied groups still learn
    weight = torch.sigmoid(torch.tensor(20.0 * (0.0 - 0.5), dtype=torch.float64))
    level = torch.tensor([0.5] * 4 + [-0.5] * 4, dtype=torch.float64) / (torch.tensor([1.0, 0.0]).std() + 1e-6)
    torch.testing.assert_close(found, (1 - weight) * level, atol=1e-6, rtol=1e-6)
    mixed = tabular(extra={"answer": torch.arange(16)})  # four answers: 2 bits, the local advantage
    torch.testing.assert_close(recipe_of("copo").advantage(mixed.decisions)[:, 0], grpo(mixed), atol=1e-5, rtol=1e-5)


def test_spae_bonus_telescopes_and_its_gate_halves_credit_after_the_solution() -> None:
    case = tabular(extra=None)
    d, phi = case.decisions, potential(case.decisions)
    assert float(phi.min()) >= -1.0 and float(phi.max()) <= 1.0
    stages = recipe_of("spae").plain["advantage"]
    bonus = recipe_of("spae", advantage=[stages[2], {"name": "constant_scale", "divisor": 1e12}, stages[4]])
    gain = bonus.advantage(d)
    for row, keep in enumerate(d.valid()):
        first = {u: int(torch.nonzero(keep & (d.unit[row] == u))[0]) for u in d.unit[row][keep].tolist()}
        units = sorted(first)
        total = sum(float(gain[row, first[u]]) for u in units)
        assert total == pytest.approx(0.1 * float(phi[row, first[units[-1]]] - phi[row, first[units[0]]]), abs=1e-9)
    sure = {**d.extra, "probe_accuracy": torch.ones(d.shape), "probe_confidence": torch.ones(d.shape)}
    after = recipe_of("spae", advantage=stages[:4]).advantage(d.with_fields(extra=sure))
    base = recipe_of("spae", advantage=stages[:3]).advantage(d)
    started = d.unit.masked_fill(~d.valid(), 9).amin(1, keepdim=True)
    torch.testing.assert_close(after, torch.where(d.unit > started, 0.5, 1.0) * base)  # solved in the first unit
    assert bool((d.valid() & (d.unit > started)).any())


def test_aspo_bonus_applies_only_to_tool_using_successes_and_keeps_their_sign() -> None:
    case = episodes([1, 1, 1, 0], [0, 0, 0, 0], 4, extra={"first_event": torch.tensor([0, 3, -1, 0])})
    found, base = (recipe_of(name).advantage(case)[:, 0] for name in ("aspo", "grpo"))
    bonus = torch.tensor([-2.0 * (0 - 1.5) / 4, -2.0 * (3 - 1.5) / 4], dtype=torch.float64).clamp(
        -0.7 * base[0], 0.7 * base[0]
    )
    torch.testing.assert_close(found[:2], base[:2] + bonus)
    torch.testing.assert_close(found[2:], base[2:])
    assert bool((found[:3] > 0).all())


def test_progrpo_adds_the_rarity_bonus_only_in_mixed_groups() -> None:
    case = tabular()
    found, base = recipe_of("progrpo").advantage(case.decisions)[:, 0], grpo(case)
    for row, keep in enumerate(case.decisions.valid()):
        logp = case.decisions.logp_old[row][keep].sort()[0]
        rare = logp[: max(1, math.ceil(0.2 * len(logp)))].mean().exp()
        mixed = len(rewards(case)[groups(case) == groups(case)[row]].unique()) > 1
        bonus = 0.3 * (case.decisions.extra["prompt_confidence"][row] - rare) if mixed else 0.0
        assert float(found[row]) == pytest.approx(float(base[row] + bonus), abs=1e-6)


def test_pipo_weights_the_last_batch_by_the_reward_gain() -> None:
    fresh = episodes([1, 0, 1, 1], [0, 0, 0, 0], source=torch.zeros(4, dtype=torch.long))
    old = episodes([1, 0, 0, 0], [0, 0, 0, 0], source=torch.ones(4, dtype=torch.long))
    both, recipe = cat([fresh, old]), recipe_of("pipo")
    base = recipe.advantage(both)
    torch.testing.assert_close(base[:4], recipe_of("grpo").advantage(fresh))
    assert float(base[4:].abs().max()) == 0.0  # too few batches seen to judge
    stage = ImprovementBaseline(window=2)
    for mean in (0.25, 0.5):
        stage.observe(episodes([mean], [0], source=torch.zeros(1, dtype=torch.long)))
    gain = (0.75 - 0.375) / 0.125  # in standard deviations of the two batches before
    plain = torch.tensor([[0.5], [-0.5], [0.25], [-0.25], [0.6], [-0.2], [-0.2], [-0.2]], dtype=torch.float64)
    weighted = stage(plain, both)
    torch.testing.assert_close(weighted[:4], plain[:4])
    torch.testing.assert_close(weighted[4:], plain[4:] / 0.3 * gain)
    worse = both.with_fields(reward=torch.zeros_like(both.reward))
    assert float(stage(plain, worse)[4:].abs().max()) == 0.0  # a decrease in reward has loss_weight = 0


@pytest.mark.parametrize("history", [[], [0.1] * 7 + [0.2], [0.9] * 7 + [0.8]], ids=["none", "gain", "loss"])
def test_pipo_adds_a_last_batch_term_only_with_a_reward_history(history: list[float]) -> None:
    case = tabular(rollouts=8, source=torch.tensor([0] * 4 + [1] * 4).repeat(4), drift=0.5)
    d, stages = case.decisions, read_recipe("pipo")["advantage"]
    stages[-1]["loss_weight"] = 0.5
    recipe, again = recipe_of("pipo", advantage=stages), d.require("source") == 1
    recipe.pipeline.stages[-1].rewards = history
    mask, ratio = d.valid(), (case.logp() - d.logp_old).exp()
    plain = torch.zeros(32, dtype=torch.float64)
    for rows in (again, ~again):
        plain[rows] = standardised(rewards(case)[rows], groups(case)[rows])
    normalised = plain / group_mean(plain.abs(), groups(case) + 4 * again).clamp(min=1e-8)
    past, gain = torch.tensor(history), 0.0
    if history:
        gain = float((rewards(case)[~again].mean() - past.mean()) / past.std(correction=0))
    coefficient = (gain * normalised).clamp(-10, 10) * (1.0 if gain >= 0 else 0.5)
    assert (gain == 0) == (not history) and (not history or (gain > 0) == (history[0] < 0.5))
    expected = seq_mean(ppo(case, plain)[~again], mask[~again])
    expected = expected + seq_mean((-coefficient[:, None] * ratio.clamp(max=1.2))[again], mask[again])
    loss, _ = recipe.loss(d, recipe.advantage(d), case.logp())
    target, found = (torch.autograd.grad(value, case.logits, retain_graph=True)[0] for value in (expected, loss))
    torch.testing.assert_close(found, target)
    if not history:  # GRPO on the new rows
        fresh, base = d.select(~again), recipe_of("grpo", estimator={"aggregate": "sequence_mean"})
        value, _ = base.loss(fresh, base.advantage(fresh), case.logp()[~again])
        torch.testing.assert_close(found, torch.autograd.grad(value, case.logits)[0], rtol=1e-12, atol=0)


def test_equal_durations_equal_ppo_and_duration_weights_undo_sampling_rates() -> None:
    case = tabular(extra={"duration": torch.full((16,), 3.0, dtype=torch.float64)})
    torch.testing.assert_close(
        recipe_of("duration_aware").advantage(case.decisions), recipe_of("ppo").advantage(case.decisions)
    )
    # a fast and a slow arm, sampled in proportion to 1 / duration: weights restore equal shares
    duration = torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    arm = episodes([0, 0, 0, 0], [0, 0, 0, 0], extra={"duration": duration})
    weight = recipe_of("duration_aware").pipeline.stages[2].factor(arm)[:, 0]
    assert float(weight[:3].sum()) == pytest.approx(float(weight[3]))


def test_proact_without_rollouts_is_step_level_ppo() -> None:
    case, written = tabular(), recipe_of("proact").plain["advantage_source"]
    start = {name: value for name, value in written.items() if name != "rollout_weight"}
    none = recipe_of("proact", advantage_source=start).advantage(case.decisions.with_fields(extra={}))
    steps = {
        "name": "gae",
        "gamma": 0.9,
        "lam": 0.95,
        "level": "unit",
    }  # of the single-step recipe, Bredis et al. 2025
    torch.testing.assert_close(none, recipe_of("vl_dac", advantage_source=steps).advantage(case.decisions))
    zero = recipe_of("proact", advantage_source={**written, "rollout_weight": 0.0})
    torch.testing.assert_close(zero.advantage(case.decisions), none)
    mixed = case.decisions.with_fields(value=0.5 * (case.decisions.value + case.decisions.extra["rollout_value"]))
    torch.testing.assert_close(
        recipe_of("proact").advantage(case.decisions), recipe_of("proact", advantage_source=start).advantage(mixed)
    )


def test_empg_without_its_terms_equals_the_base_and_its_factor_falls_with_entropy() -> None:
    case, stages = tabular(), recipe_of("empg").plain["advantage"]
    off = [{"name": "modulate", "factor": {"name": "unit_entropy", "sharpness": 0.0}}]
    none = recipe_of("empg", advantage=stages[:3] + off + stages[5:]).advantage(case.decisions)
    base = recipe_of("empg", advantage=stages[:3] + stages[5:]).advantage(case.decisions)
    torch.testing.assert_close(none, base)
    factor = recipe_of("empg").pipeline.stages[3].factor(case.decisions)
    valid = case.decisions.valid()
    assert float(factor[valid].mean()) == pytest.approx(1.0)
    unit = torch.stack([case.decisions.unit[valid], torch.nonzero(valid)[:, 0]], 1)
    entropy = torch.stack([case.decisions.entropy[valid][(unit == own).all(1)].mean() for own in unit])
    order = torch.argsort(entropy)
    assert bool((torch.diff(factor[valid][order]) <= 1e-12).all())  # the factor decreases with entropy


def test_attention_rhythm_increases_only_positive_advantages() -> None:
    attention = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1.0, 0], [1.0, 0, 0, 0]]])
    assert attention_distance(attention, window=2).tolist() == [[0.0, 0.5, 0.0, 2.0]]
    assert future_attention(attention, 1, 3)[0].tolist() == pytest.approx([1.5 / 3, 0.0, 0.0, 0.0])
    case, stages = tabular(), recipe_of("attention_rhythm").plain["advantage"]
    found, base = recipe_of("attention_rhythm").advantage(case.decisions), grpo(case)[:, None]
    ratio = torch.where(case.decisions.valid() & (base != 0), found / torch.where(base == 0, 1.0, base), 1.0)
    assert bool((ratio[(base < 0).expand_as(ratio)] - 1 < 1e-5).all()) and float(ratio.max()) > 1.2
    off = [*stages[:3], {"name": "modulate", "factor": {"name": "attention_rhythm", "gain": 0.0}}]
    plain = recipe_of("attention_rhythm", advantage=off).advantage(case.decisions)
    torch.testing.assert_close(plain, base * case.decisions.valid(), atol=1e-5, rtol=1e-5)


def test_the_attention_rhythm_compares_with_the_next_decision() -> None:
    """Padding and environment tokens, whose distance is 0, are skipped."""
    distance = torch.tensor([[5.0, 5.0, 9.0, 8.0]], dtype=torch.float64)
    wide = torch.tensor([[5.0, 0.0, 5.0, 9.0, 0.0, 8.0, 0.0, 0.0]], dtype=torch.float64)
    mask = wide > 0
    rhythm = AttentionRhythm("local", share=0.25)
    for values, valid in ((distance, torch.ones(1, 4, dtype=torch.bool)), (wide, mask)):
        case = Decisions(torch.zeros_like(values), mask=valid, extra={"waad": values})
        assert rhythm(case)[valid].tolist() == [1.0, 1.5, 1.0, 1.0]


@pytest.mark.parametrize("rule", ["local", "global", "coupled"])
def test_attention_rhythm_rules_add_the_gain_of_the_same_share_of_decisions(rule: str) -> None:
    case = tabular()
    stage = {"name": "modulate", "factor": {"name": "attention_rhythm", "rule": rule, "gain": 1.0, "share": 0.4}}
    factor = recipe_of("attention_rhythm", advantage=[stage]).pipeline.stages[0].factor(case.decisions)
    extra = (factor - 1.0).masked_fill(~case.decisions.valid(), 0.0)
    target = (case.decisions.valid().sum(1) * 0.4).ceil()
    torch.testing.assert_close(extra.sum(1), target.double())
