"""Tests of the gated modular MLP: plain MLP in the limit, equality with a loop over samples, and context dependence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from robopolicy.contrib.control.modular import ModularMLP, modular_layer
from robopolicy.contrib.control.vector_value import TermValues
from robopolicy.critics.value import ValueConfig
from robopolicy.errors import UserError
from robopolicy.nets.mlp import MLP
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.spec import PolicySpec


def test_single_module_with_unit_gates_equals_a_plain_mlp() -> None:
    torch.manual_seed(0)
    net = ModularMLP(4, (8, 6), 3, context_dim=2, modules=1)
    for p in net.context.parameters():
        nn.init.zeros_(p)  # shares of one module are 1, gates 2 sigmoid(0) = 1
    x, context = torch.randn(7, 4), torch.randn(7, 2)
    y = x
    for weight, bias in zip(net.weights[:2], net.biases[:2], strict=True):
        y = nn.functional.layer_norm(nn.functional.linear(y, weight[0], bias[0]), weight.shape[1:2]).tanh()
    torch.testing.assert_close(net(x, context), nn.functional.linear(y, net.weights[2][0], net.biases[2][0]))
    assert net.representation(x, context).shape == (7, 8)


def test_modular_layer_equals_a_loop_over_samples_and_modules() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((5, 4), (3, 6, 4), (3, 6)))
    shares, gates = torch.rand(5, 2, 3, generator=g).softmax(-1), torch.rand(5, 2, 6, generator=g)
    expected = []
    for b in range(5):
        mixed = sum((shares[b, 0, m] * (weight[m] @ x[b]) for m in range(3)), torch.zeros(6))
        offset = sum((shares[b, 1, m] * bias[m] for m in range(3)), torch.zeros(6))
        expected.append(gates[b, 0] * mixed + gates[b, 1] * offset)
    torch.testing.assert_close(modular_layer(x, weight, bias, shares, gates), torch.stack(expected))


def test_contexts_share_module_weights_but_change_the_outputs() -> None:
    torch.manual_seed(0)
    net = ModularMLP(4, (16,), 2, context_dim=2, modules=4)
    with torch.no_grad():
        net.context[-1].weight.mul_(100)  # type: ignore[operator, union-attr]
    x = torch.randn(3, 4)
    first, second = (net(x, torch.eye(2)[[k]].expand(3, 2)) for k in range(2))
    assert float((first - second).detach().abs().max()) > 1e-2
    (gradient,) = torch.autograd.grad(first.sum(), net.weights[0], retain_graph=True)
    assert bool((gradient.abs().amax((1, 2)) > 0).all())  # every module learns from every context
    shares, gates = net.modulation(torch.randn(6, 2))[0]
    torch.testing.assert_close(shares.sum(-1), torch.ones(6, 2))
    assert bool(((gates > 0) & (gates < 2)).all())


def error(net: nn.Module, modular: bool, seed: int) -> float:
    """Mean squared error after training on two tasks with different targets for the same features."""
    g = torch.Generator().manual_seed(seed)
    maps = torch.randn(2, 3, 6, generator=g)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss(count: int) -> Tensor:
        x, task = torch.randn(count, 6, generator=g), torch.randint(2, (count,), generator=g)
        context = torch.eye(2)[task]
        y = torch.einsum("boi,bi->bo", maps[task], x).tanh()
        out = net(x, context) if modular else net(torch.cat([x, context], 1))
        return (out - y).square().mean()

    for _ in range(300):
        optimizer.zero_grad()
        loss(128).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(4000))


def test_modular_mlp_fits_two_tasks_better_than_a_plain_mlp_of_similar_size() -> None:
    torch.manual_seed(0)
    modular = ModularMLP(6, (24, 24), 3, context_dim=2, modules=4, context_width=16)
    size = sum(p.numel() for p in modular.parameters())
    plain = MLP(8, (72, 72), 3)
    assert size <= sum(p.numel() for p in plain.parameters()) * 1.1, size
    assert error(modular, True, 0) < error(plain, False, 0)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="positive sizes"):
        ModularMLP(2, (0,), 1, context_dim=1)
    with pytest.raises(UserError, match="positive sizes"):
        ModularMLP(2, (4,), 1, context_dim=1, modules=0)


def test_a_misspelt_backbone_option_is_reported() -> None:
    with pytest.raises(UserError, match="Did you mean 'modules'"):
        GaussianConfig(backbone="modular", backbone_options={"modul": 2})


@pytest.mark.parametrize("layer_norm", [False, True])
def test_plain_values_of_terms_use_layer_norm_as_configured(layer_norm: bool) -> None:
    values = TermValues(ValueConfig(hidden=(8, 8), layer_norm=layer_norm), PolicySpec({"state": (2,)}, 1), terms=2)
    assert sum(isinstance(part, nn.LayerNorm) for part in values.head.modules()) == 2 * layer_norm
