"""Tests of the composed loss: gradient at ratio 1, diagnostics, weights, regularisers, methods as configurations."""

import itertools

import pytest
import torch
from surrogate_rules import check_extreme_ratios, check_fresh_data, gradient_of

from robopolicy.core.advantage import Baseline, Broadcast, DepthDiscount, Pipeline, Scale, Scope, outcome
from robopolicy.core.aggregate import AGGREGATES
from robopolicy.core.decisions import Decisions, by_group, by_trajectory, by_unit
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds, DepthBounds, Hierarchy
from robopolicy.core.regularizers import Anneal, Dual, k3
from robopolicy.core.surrogates import SURROGATES

STRAIGHT_THROUGH = {"cispo", "nft", "nft_scaled"}
SMOOTH = sorted(set(SURROGATES.product()) - STRAIGHT_THROUGH)


def row_advantage(decisions: Decisions) -> torch.Tensor:
    """One number per trajectory, repeated on its rows."""
    return outcome(decisions)


@pytest.mark.parametrize("surrogate", SURROGATES.product())
def test_fresh_data_gives_the_plain_policy_gradient(decisions, surrogate):
    check_fresh_data(surrogate, decisions)


@pytest.mark.parametrize("surrogate", SURROGATES.product())
def test_extreme_ratios_stay_finite(decisions, surrogate):
    check_extreme_ratios(surrogate, decisions)


@pytest.mark.parametrize(
    ("surrogate", "level", "aggregate"),
    list(itertools.product(SURROGATES.product(), ["token", "unit", "sequence"], AGGREGATES.product())),
)
def test_at_ratio_one_every_surrogate_has_the_same_gradient(decisions, surrogate, level, aggregate):
    advantage = row_advantage(decisions)
    config = EstimatorConfig(level=level, surrogate=surrogate, aggregate=aggregate, length=7.0)
    gradient, _ = gradient_of(Estimator(config), decisions, advantage, decisions.logp_old)
    leaf = decisions.logp_old.clone().requires_grad_()
    ids = {"token": None, "unit": by_unit, "sequence": by_trajectory}[level]
    pooled = leaf.masked_fill(~decisions.valid(), 0.0)
    if ids is not None:
        index = ids(decisions).expand(decisions.shape)
        same = index.flatten().unsqueeze(0) == index.flatten().unsqueeze(1)
        pooled = (same.double() @ pooled.flatten()).view(decisions.shape)
    plain = AGGREGATES[aggregate](-advantage * pooled, decisions.mask, decisions, 7.0)
    (expected,) = torch.autograd.grad(plain, leaf)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("surrogate", ["importance_sampling", "clip", "dual_clip"])
def test_hierarchical_level_has_the_same_gradient_at_ratio_one(decisions, surrogate):
    config = EstimatorConfig(level="hierarchical", surrogate=surrogate, hierarchy=Hierarchy(outer="unit"))
    advantage, valid = decisions.require("reward"), decisions.valid()
    gradient, _ = gradient_of(Estimator(config), decisions, advantage, decisions.logp_old)
    torch.testing.assert_close(gradient, -(advantage * valid) / valid.sum())


def test_hierarchy_budgets_do_not_change_approx_kl(decisions):
    logp, advantage = decisions.logp_old + 1.0, torch.ones(len(decisions))
    plain, gated = (
        Estimator(EstimatorConfig(level=level, surrogate="importance_sampling"))(decisions, advantage, logp)[1]
        for level in ("token", "hierarchical")
    )
    torch.testing.assert_close(gated["approx_kl"], plain["approx_kl"])
    assert gated["ratio_max"] < 0.5 < plain["ratio_max"]


@pytest.mark.parametrize("surrogate", SMOOTH)
@pytest.mark.parametrize("level", ["token", "unit", "sequence"])
def test_gradient_away_from_ratio_one_equals_finite_differences(decisions, shift, surrogate, level):
    config = EstimatorConfig(
        level=level,
        reduction="mean",
        surrogate=surrogate,
        bounds=ConstantBounds(0.05, 0.08),
        kl_coef=0.1,
        ratio_variance_coef=0.2,
        importance_cap=1.1,
    )
    estimator, advantage = Estimator(config), decisions.require("reward")
    leaf = (decisions.logp_old + shift).requires_grad_()
    assert torch.autograd.gradcheck(lambda logp: estimator(decisions, advantage, logp)[0], leaf)


@pytest.mark.parametrize("surrogate", ["policy_gradient", "cispo"])
def test_long_rows_with_large_log_ratios_keep_their_gradient(surrogate):
    """The limit keeps exponentials finite; a loss linear in the log-ratio has none, so its gradient stays."""
    decisions = Decisions(torch.full((2, 60), -1.0))
    advantage = torch.tensor([1.0, 0.0])
    estimator = Estimator(EstimatorConfig(level="sequence", surrogate=surrogate, aggregate="sequence_sum"))
    for rise in (0.5, 2.0):  # 30 nats, and more than a float32 ratio can represent
        gradient, info = gradient_of(estimator, decisions, advantage, decisions.logp_old + rise)
        weight = 1.2 if surrogate == "cispo" else 1.0
        torch.testing.assert_close(gradient, -weight * 60 / 2 * advantage[:, None].expand(2, 60))
        assert info["ratio_max"].isfinite()


def test_diagnostics_equal_their_definitions(decisions, shift):
    valid, advantage = decisions.valid(), decisions.require("reward")
    config = EstimatorConfig(bounds=ConstantBounds(0.1))
    loss, info = Estimator(config)(decisions, advantage, decisions.logp_old + shift, decisions.entropy)
    ratio, a = shift[valid].exp(), advantage[valid]
    assert info["approx_kl"].item() == pytest.approx((ratio - 1 - shift[valid]).mean().item())
    assert info["ratio_mean"].item() == pytest.approx(ratio.mean().item())
    assert info["ratio_max"].item() == pytest.approx((ratio - 1).abs().max().item())
    assert info["entropy"].item() == pytest.approx(decisions.entropy[valid].mean().item())
    clipped = ((a > 0) & (ratio > 1.1)) | ((a < 0) & (ratio < 0.9))
    assert info["clip_fraction"].item() == pytest.approx(clipped.double().mean().item())
    assert 0 < info["clip_fraction"] < 1
    expected = -torch.minimum(ratio * a, ratio.clamp(0.9, 1.1) * a).mean()
    torch.testing.assert_close(loss, expected)


def test_info_is_detached(decisions, shift):
    leaf = (decisions.logp_old + shift).requires_grad_()
    config = EstimatorConfig(kl_coef=0.1, entropy_coef=0.1, ratio_variance_coef=0.1)
    _, info = Estimator(config)(decisions, row_advantage(decisions), leaf, leaf**2)
    assert set(info) == {"approx_kl", "clip_fraction", "ratio_mean", "ratio_max", "entropy", "kl_ref", "ratio_variance"}
    assert not any(value.requires_grad for value in info.values())


def test_no_gradient_flows_into_the_advantage(decisions):
    advantage = row_advantage(decisions).clone().requires_grad_()
    leaf = decisions.logp_old.clone().requires_grad_()
    Estimator(EstimatorConfig())(decisions, advantage, leaf)[0].backward()
    assert advantage.grad is None


def test_minibatches_of_rows_add_up_to_the_batch(decisions, shift):
    """The token-mean loss of a batch is the mean over its minibatches, weighted by their decisions."""
    estimator, advantage = Estimator(EstimatorConfig()), decisions.require("reward")
    logp = decisions.logp_old + shift
    whole, _ = estimator(decisions, advantage, logp)
    total, weight = 0.0, 0
    for rows in torch.arange(len(decisions)).split(4):
        part = decisions.select(rows)
        count = int(part.valid().sum())
        total, weight = total + count * estimator(part, advantage[rows], logp[rows])[0], weight + count
    torch.testing.assert_close(total / weight, whole)


def test_advantages_may_be_given_per_row(decisions, shift):
    estimator, logp, row = Estimator(EstimatorConfig()), decisions.logp_old + shift, row_advantage(decisions)
    expected, _ = estimator(decisions, row.expand(decisions.shape), logp)
    for given in (row, row.squeeze(1)):
        torch.testing.assert_close(estimator(decisions, given, logp)[0], expected)


def test_masked_decisions_leave_numerator_and_denominator(decisions, shift):
    valid = decisions.valid().clone()
    valid[:, 2:] = False
    advantage, logp = decisions.require("reward"), decisions.logp_old + shift
    first_two = lambda d, a, z: d.depths() < 2  # noqa: E731
    ruled, _ = Estimator(EstimatorConfig(masks=(first_two,)))(decisions, advantage, logp)
    masked, _ = Estimator(EstimatorConfig())(decisions.with_fields(mask=valid), advantage, logp)
    torch.testing.assert_close(ruled, masked)


def test_entropy_bonus_and_kl_penalty_enter_with_their_coefficients(decisions, shift):
    valid, advantage, logp = decisions.valid(), decisions.require("reward"), decisions.logp_old + shift
    base, _ = Estimator(EstimatorConfig())(decisions, advantage, logp)
    config = EstimatorConfig(entropy_coef=0.3, kl_coef=0.2)
    loss, info = Estimator(config)(decisions, advantage, logp, decisions.entropy)
    kl = k3((logp - decisions.logp_ref)[valid]).mean()
    torch.testing.assert_close(loss, base - 0.3 * decisions.entropy[valid].mean() + 0.2 * kl)
    torch.testing.assert_close(info["kl_ref"], kl)
    with pytest.raises(ValueError, match="entropy"):
        Estimator(config)(decisions, advantage, logp)


def test_controllers_observe_and_resume(decisions, shift):
    def build() -> Estimator:
        return Estimator(EstimatorConfig(), {"kl": Dual(0.1, target=1e-6, rate=0.1)})

    estimator = build()
    _, info = estimator(decisions, row_advantage(decisions), decisions.logp_old + shift)
    estimator.observe(info, count=5)
    assert estimator.controllers["kl"].value > 0.1
    resumed = build()
    resumed.load_state_dict(estimator.state_dict())
    assert resumed.controllers["kl"].value == estimator.controllers["kl"].value


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"level": "word"}, "Unknown level 'word'"),
        ({"surrogate": "trpo"}, "Unknown surrogate 'trpo'; known: .*dual_clip"),
        ({"surrogate_options": {"cap": 2.0}}, "Unknown option of surrogate 'clip' 'cap'"),
        ({"aggregate": "max"}, "Unknown aggregate"),
        ({"kl": "k4"}, "Unknown kl"),
        ({"reduction": "max"}, "Unknown reduction"),
    ],
)
def test_unknown_choices_are_refused_at_construction(choice, message):
    with pytest.raises(ValueError, match=message):
        EstimatorConfig(**choice)


def test_wrong_shapes_are_named(decisions):
    estimator = Estimator(EstimatorConfig())
    with pytest.raises(ValueError, match="logp must have shape"):
        estimator(decisions, row_advantage(decisions), decisions.logp_old[:, :1])
    with pytest.raises(ValueError, match="advantage must be"):
        estimator(decisions, row_advantage(decisions)[:2], decisions.logp_old)
    with pytest.raises(ValueError, match="Unknown controller"):
        Estimator(EstimatorConfig(), {"kll": Anneal(1.0, 0.0, 1)})


def test_grpo_is_a_configuration(decisions, shift):
    scope = Scope(by_group, reduce_over=by_trajectory)
    advantage = Pipeline([Baseline("mean", scope), Scale(scope)])(outcome(decisions), decisions)
    loss, _ = Estimator(EstimatorConfig(aggregate="sequence_mean"))(decisions, advantage, decisions.logp_old + shift)
    valid, trajectory = decisions.valid(), by_trajectory(decisions).flatten()
    means = []
    for key in trajectory.unique():
        rows = trajectory == key
        keep, ratio = valid[rows], shift[rows].exp()
        terms = torch.minimum(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows])
        means.append(-terms[keep].mean())
    torch.testing.assert_close(loss, sum(means) / len(means))


def test_dppo_is_a_configuration():
    """Ratio per denoising step, clip range growing along the chain, earlier steps discounted."""
    generator = torch.Generator().manual_seed(0)
    old, change = torch.randn(2, 3, 4, generator=generator), 0.02 * torch.randn(6, 4, generator=generator)
    decisions, env_advantage = Decisions(old.flatten(0, 1)), torch.randn(6, generator=generator)
    discounted = Broadcast()(env_advantage[:, None], decisions) * DepthDiscount(0.9, 4)(decisions)
    bounds = DepthBounds(0.001, 0.01, steps=4)
    loss, _ = Estimator(EstimatorConfig(bounds=bounds))(decisions, discounted, decisions.logp_old + change)
    total = 0.0
    for row, step in itertools.product(range(6), range(4)):
        width = 0.001 + 0.009 * (torch.exp(torch.tensor(3.0 * step / 3)) - 1) / (torch.exp(torch.tensor(3.0)) - 1)
        a, ratio = env_advantage[row] * 0.9 ** (3 - step), change[row, step].exp()
        total += -torch.minimum(a * ratio, a * ratio.clamp(1 - width, 1 + width)) / 24
    torch.testing.assert_close(loss, total, rtol=1e-4, atol=1e-6)


def test_reinflow_configuration_equals_the_hand_computed_loss():
    """One ratio per chunk: log-ratios summed over the chain, divided by steps x dimensions."""
    generator = torch.Generator().manual_seed(0)
    old, change = torch.randn(2, 3, 4, generator=generator), torch.randn(6, 4, generator=generator)
    decisions, advantage = Decisions(old.flatten(0, 1)), torch.randn(6, generator=generator)
    config = EstimatorConfig(level="unit", reduction="normalized", count=4 * 12.0, bounds=ConstantBounds(0.01))
    loss, _ = Estimator(config)(decisions, advantage, decisions.logp_old + change)
    ratio = (change.sum(1) / 48).exp()
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.99, 1.01) * advantage).mean()
    torch.testing.assert_close(loss, expected)
