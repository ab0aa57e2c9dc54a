"""Tests of expectiles, advantage weights and the calibrated penalty, with closed forms and small tables."""

import math

import pytest
import torch
from torch import Tensor

from robopolicy.critics.value import advantage_weight, calibrated, conservative_penalty, expectile_loss, softmax_weights

RETURNS = torch.tensor([0.0, 1.0, 2.0, 7.0])  # of four actions in one state


def expectile_of(targets: Tensor, expectile: float) -> float:
    low, high = float(targets.min()), float(targets.max())
    for _ in range(60):  # the gradient is monotone in the prediction
        middle = torch.tensor((low + high) / 2, requires_grad=True)
        expectile_loss(targets - middle, expectile).sum().backward()
        assert middle.grad is not None
        low, high = (middle.item(), high) if middle.grad < 0 else (low, middle.item())
    return (low + high) / 2


def test_expectile_one_half_is_the_mean_and_one_is_the_maximum() -> None:
    assert expectile_of(RETURNS, 0.5) == pytest.approx(float(RETURNS.mean()), abs=1e-4)
    assert expectile_of(RETURNS, 1 - 1e-5) == pytest.approx(float(RETURNS.max()), abs=1e-2)
    between = [expectile_of(RETURNS, e) for e in (0.5, 0.7, 0.9, 0.99)]
    assert between == sorted(between) and between[-1] < 7


def test_expectile_one_half_is_half_the_squared_error() -> None:
    difference = torch.randn(20)
    torch.testing.assert_close(expectile_loss(difference, 0.5), 0.5 * difference.square())


def test_advantage_weights_are_bounded_exponentials() -> None:
    weight = advantage_weight(torch.tensor([-1.0, 0.0, 0.5, 1e6]), 2.0, 100.0)
    torch.testing.assert_close(weight, torch.tensor([math.exp(-2), 1.0, math.e, 100.0]))
    assert torch.equal(advantage_weight(RETURNS, 0.0, 100.0), torch.ones(4))
    assert advantage_weight(torch.tensor(torch.nan), 1.0, 10.0).isnan()


def test_softmax_weights_sum_to_one_and_are_uniform_for_equal_values() -> None:
    weights = softmax_weights(torch.randn(5, 7) * 100, 0.3)
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    torch.testing.assert_close(softmax_weights(torch.full((2, 4), -37.0), 0.1), torch.full((2, 4), 0.25))
    values = torch.tensor([[[0.0, 2 * math.log(3.0)]], [[0.0, 0.0]]])  # (2, 1, C=2), at temperature 2
    torch.testing.assert_close(softmax_weights(values, 2.0), torch.tensor([[[0.25, 0.75]], [[0.5, 0.5]]]))


def test_calibration_stops_the_gradient_below_the_return() -> None:
    policy = torch.tensor([[[0.5, 1.5], [0.5, 1.5], [0.5, 1.5]]], requires_grad=True)  # (M=1, B=3, C=2)
    returns = torch.tensor([1.0, torch.nan, 2.0])
    data, uniform = torch.zeros(1, 3, requires_grad=True), torch.zeros(1, 3, 4)
    penalty = conservative_penalty(data, policy, uniform, returns)
    (gradient,) = torch.autograd.grad(penalty.sum(), policy)
    assert gradient[0, 0, 0] == 0 and gradient[0, 0, 1] > 0  # below and above a return of 1
    assert bool((gradient[0, 1] > 0).all())  # a NaN return sets no bound
    assert bool((gradient[0, 2] == 0).all())
    torch.testing.assert_close(calibrated(policy, returns)[0, 0], torch.tensor([1.0, 1.5]))


def test_uniform_chunks_are_never_calibrated() -> None:
    uniform = torch.zeros(2, 3, 4, requires_grad=True)
    penalty = conservative_penalty(torch.zeros(2, 3), torch.zeros(2, 3, 1), uniform, torch.full((3,), 100.0))
    (gradient,) = torch.autograd.grad(penalty.sum(), uniform)
    assert bool((gradient > 0).all())


def test_penalty_is_zero_for_equal_values_and_follows_the_soft_maximum() -> None:
    same = torch.full((2, 3, 1), 5.0)
    unknown = torch.full((3,), torch.nan)
    penalty = conservative_penalty(same[..., 0], same.expand(2, 3, 4), same.expand(2, 3, 6), unknown)
    torch.testing.assert_close(penalty, torch.zeros(2, 3))
    data, policy, uniform = torch.randn(2, 3), torch.randn(2, 3, 4), torch.randn(2, 3, 6)
    values = torch.cat([data[..., None], policy, uniform], -1)
    expected = values.exp().mean(-1).log() - data
    torch.testing.assert_close(conservative_penalty(data, policy, uniform, unknown), expected)


def test_calibration_propagates_nan() -> None:
    policy = torch.zeros(1, 2, 3)
    policy[0, 1, 2] = torch.nan
    penalty = conservative_penalty(torch.zeros(1, 2), policy, torch.zeros(1, 2, 3), torch.ones(2))
    assert penalty.isnan().tolist() == [[False, True]]
