"""Tests of gradient functions: clipping as in torch, flattening, influence on each loss, and scores per group."""

import pytest
import torch
from torch import nn

from robopolicy.core.gradients import backward, clip_gradients, flat_gradient, group_scores, influence


def test_backward_adds_the_weighted_gradient_to_the_given_leaves() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for _ in range(2):
        backward((x * y).sum() * 3, [x], weight=0.5)
    assert x.grad is not None and x.grad.tolist() == [3.0, 3.0] and y.grad is None
    backward(y.double().sum())
    assert y.grad is not None and y.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("limit", [0.3, 100.0])
def test_clipping_equals_torch(limit: float) -> None:
    torch.manual_seed(0)
    network, reference = (nn.Sequential(nn.Linear(3, 5), nn.ELU(), nn.Linear(5, 2)) for _ in range(2))
    reference.load_state_dict(network.state_dict())
    x = torch.randn(7, 3)
    for net in (network, reference):
        net[0].bias.requires_grad_(False)  # has no gradient
        net(x).square().sum().backward()
    before = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    norm = clip_gradients(network.parameters(), limit)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), limit))
    after = [p.grad for p in network.parameters() if p.grad is not None]
    for found, expected in zip(after, [p.grad for p in reference.parameters() if p.grad is not None], strict=True):
        torch.testing.assert_close(found, expected)
    assert all(map(torch.equal, before, after)) == (float(norm) < limit)


def test_unused_parameters_have_zero_gradient() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    assert flat_gradient(x.sum(), [x, y]).tolist() == [1, 1, 0, 0, 0]


def test_influence_is_the_decrease_of_each_loss_after_a_joint_step() -> None:
    gradients = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    assert influence(gradients).tolist() == [0.0, 4.0, 0.0]
    point = torch.tensor([0.3, -0.7], requires_grad=True)
    losses = [point.square().sum(), point.sum(), (point - 1).square().sum()]
    jacobian = torch.stack([flat_gradient(loss, [point]) for loss in losses])
    step = 1e-4
    moved = (point - step * jacobian.sum(0)).detach()
    lower = [moved.square().sum(), moved.sum(), (moved - 1).square().sum()]
    fell = torch.stack([(a - b).detach() / step for a, b in zip(losses, lower, strict=True)])
    torch.testing.assert_close(fell, influence(jacobian), rtol=1e-2, atol=1e-2)


def test_group_scores_are_standardised_within_each_group() -> None:
    values = torch.tensor([[1.0, 5.0], [3.0, 5.0], [10.0, 0.0]])
    scores = group_scores(values, torch.tensor([7, 7, 9]))
    assert scores.tolist() == [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    for value in (0.1, 0.7, 3.3):  # the float32 mean of 12 copies differs from the value
        assert not group_scores(torch.full((12, 1), value), torch.zeros(12, dtype=torch.int64)).any()
