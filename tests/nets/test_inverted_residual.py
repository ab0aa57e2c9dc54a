"""Tests of inverted residual networks: norms after every step, batch statistics, independent rows and members."""

import math

import pytest
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.inverted_residual import (
    BatchNorm,
    InvertedResidual,
    RMSNorm,
    batch_norms,
    batch_statistics,
    constrained_layers,
    keep_unit_norm,
)


def network(members: int = 2) -> InvertedResidual:
    torch.manual_seed(0)
    return InvertedResidual(members, 5, (8, 8), 3)


def row_norms(net: InvertedResidual) -> list[Tensor]:
    """Norms of the rows of every layer over the required norm."""
    return [
        torch.cat([p.flatten(0, -2) for p in layer.constrained()], -1).norm(dim=-1) / layer.radius.squeeze(1)
        for layer in constrained_layers(net)
    ]


def test_every_row_has_its_norm_at_the_start_and_after_every_step() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    keep_unit_norm(optimizer, net)
    before = [p.clone() for p in net.parameters()]
    for step in range(3):
        for norms in row_norms(net):
            torch.testing.assert_close(norms, torch.ones_like(norms))
        assert step == 0 or not any(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        optimizer.zero_grad()
        with batch_statistics(batch_norms(net)):
            net(torch.randn(16, 5)).square().sum().backward()
        optimizer.step()


def test_batch_statistics_normalise_the_batch_and_update_the_running_ones() -> None:
    layer = BatchNorm(2, 1)
    x = torch.tensor([[[1.0], [3.0]], [[0.0], [8.0]]])  # means 2 and 4, deviations 1 and 4
    torch.testing.assert_close(layer(x), x / math.sqrt(1 + 1e-5))
    with batch_statistics([layer]):
        torch.testing.assert_close(layer(x), torch.tensor([[[-1.0], [1.0]], [[-1.0], [1.0]]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(layer.mean, torch.tensor([[0.02], [0.04]]))
    torch.testing.assert_close(layer.var, torch.tensor([[0.99 + 0.02], [0.99 + 0.32]]))  # unbiased: 2 and 32
    scaled = (x - layer.mean[:, None]) / (layer.var[:, None] + 1e-5).sqrt()
    torch.testing.assert_close(layer(x), scaled)


def test_rms_normalisation_gives_rows_of_norm_sqrt_of_the_width() -> None:
    norms = RMSNorm(2, 4)(torch.randn(2, 3, 4)).norm(dim=-1)
    torch.testing.assert_close(norms, torch.full((2, 3), 2.0))


def test_rows_and_members_do_not_affect_each_other() -> None:
    net, x = network(), torch.randn(6, 5)
    with batch_statistics(batch_norms(net)):
        net(torch.randn(32, 5) + 2)
    output = net(x)
    assert output.shape == (2, 6, 3)
    torch.testing.assert_close(net(x[2:3]), output[:, 2:3])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter[1] += 1.0
    torch.testing.assert_close(net(x)[0], output[0])
    assert torch.equal(net(x, torch.tensor([1])), net(x)[1:])


def test_widths_must_be_equal() -> None:
    with pytest.raises(UserError, match="equal widths"):
        InvertedResidual(1, 2, (8, 16), 1)
