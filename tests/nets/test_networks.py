"""Tests of backbones: shapes, initialisation, causal masks, and independence of the rows of a batch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from robopolicy.critics.q import CriticConfig
from robopolicy.errors import UserError
from robopolicy.nets.mlp import MLP, EnsembleLinear, EnsembleMLP, ResidualMLP, initialize
from robopolicy.nets.time import SinusoidalEmbedding, TimeEmbedding
from robopolicy.nets.transformer import ActionTransformer
from robopolicy.nets.unet1d import UNet1d
from robopolicy.policies.heads.flow import FlowConfig


def transformer(**overrides: int) -> ActionTransformer:
    sizes = {"horizon": 5, "obs_horizon": 4, "first_action": 0, "width": 16, "layers": 2, "heads": 2} | overrides
    return ActionTransformer(3, 6, **sizes).eval()  # type: ignore[arg-type]


def test_orthogonal_initialisation_uses_the_gains_of_ppo() -> None:
    net = MLP(8, (16, 16), 4, orthogonal_gain=0.01)
    first, output = net[0], net[-1]
    assert isinstance(first, nn.Linear) and isinstance(output, nn.Linear)
    torch.testing.assert_close(first.weight.T @ first.weight, 2.0 * torch.eye(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.weight @ output.weight.T, 1e-4 * torch.eye(4), atol=1e-8, rtol=0)
    assert all(not bool(m.bias.any()) for m in net if isinstance(m, nn.Linear))


def normalized(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


def test_xavier_initialisation_is_uniform_with_zero_biases() -> None:
    for net in (MLP(30, (50,), 20), EnsembleMLP(3, 30, (50,), 20)):
        initialize(net, "xavier")
        layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear | EnsembleLinear)]
        for layer, sizes in zip(layers, ((30, 50), (50, 20)), strict=True):
            bound = math.sqrt(6 / sum(sizes))
            assert not bool(layer.bias.any()) and 0.95 * bound < float(layer.weight.abs().max()) <= bound
            assert float(layer.weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    with pytest.raises(UserError, match="Did you mean 'xavier'"):
        CriticConfig(init="xaver")
    with pytest.raises(UserError, match="'unet' has its own initialisation"):
        FlowConfig(backbone="unet", init="xavier")


@pytest.mark.parametrize("after", [False, True])
def test_layer_norm_is_before_or_after_the_activation(after: bool) -> None:
    net = EnsembleMLP(2, 3, (4,), 1, activation="relu", layer_norm=True, norm_after_activation=after)
    plain = MLP(3, (4,), 1, activation="relu", layer_norm=True)  # always after
    x = torch.randn(5, 3)
    first, last = net.layers[0], net.layers[-1]
    hidden = torch.einsum("bi,mio->mbo", x, first.weight) + first.bias  # type: ignore[operator, arg-type]
    hidden = normalized(hidden.relu()) if after else normalized(hidden).relu()
    expected = torch.einsum("mbi,mio->mbo", hidden, last.weight) + last.bias  # type: ignore[operator, arg-type]
    torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(plain(x), plain[-1](normalized(plain[0](x).relu())))


def test_residual_block_with_zero_weights_is_the_identity() -> None:
    net = ResidualMLP(4, (8, 8, 8), 2, activation="relu")
    for parameter in net.blocks.parameters():
        nn.init.zeros_(parameter)
    x = torch.randn(3, 4)
    assert torch.equal(net(x), net.output(net.input(x)))


@pytest.mark.parametrize("hidden", [(), (8, 8), (8, 16, 8)])
def test_invalid_residual_widths_are_refused(hidden: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="odd number of equal widths"):
        ResidualMLP(4, hidden, 2)


def test_unknown_activations_suggest_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'tanh'"):
        MLP(2, (4,), 1, activation="tahn")


def test_time_embedding_separates_neighbouring_times() -> None:
    embedding = SinusoidalEmbedding(16)(torch.linspace(0, 1, 101))
    distance = torch.cdist(embedding, embedding) + 10 * torch.eye(101)
    assert embedding.shape == (101, 16)
    assert float(distance.min()) > 0.05
    with pytest.raises(UserError, match="even width"):
        SinusoidalEmbedding(5)


def test_time_embedding_of_width_one_is_the_time() -> None:
    embedding = TimeEmbedding(1)
    assert embedding(torch.tensor([0.1, 0.7])).tolist() == torch.tensor([[0.1], [0.7]]).tolist()
    assert not list(embedding.parameters())


@pytest.mark.parametrize("horizon", [1, 5, 7, 8, 16])
def test_unet_output_has_the_shape_of_any_horizon(horizon: int) -> None:
    net = UNet1d(3, 12, channels=(8, 16, 24), time_dim=8)
    x = torch.randn(4, horizon, 3, requires_grad=True)
    out = net(x, torch.rand(4), torch.randn(4, 2, 6))
    assert out.shape == x.shape
    out.square().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in net.parameters())


def test_unet_refuses_channels_not_divisible_by_its_groups() -> None:
    with pytest.raises(UserError, match="divisible by 8"):
        UNet1d(3, 12, channels=(12, 24))


@pytest.mark.parametrize("make", [lambda: UNet1d(3, 24, channels=(8, 16), time_dim=8), transformer])
def test_rows_do_not_depend_on_other_rows(make: Callable[[], nn.Module]) -> None:
    net = make()
    x, t, features = torch.randn(6, 5, 3), torch.rand(6), torch.randn(6, 4, 6)
    alone = net(x[2:3], t[2:3], features[2:3])
    torch.testing.assert_close(net(x, t, features)[2:3], alone, atol=1e-5, rtol=1e-5)


def gradients(net: ActionTransformer, i: int) -> tuple[Tensor, Tensor]:
    """L1 norm of the gradient of action i with respect to each noisy action and each observation."""
    x, features = torch.randn(1, 5, 3, requires_grad=True), torch.randn(1, 4, 6, requires_grad=True)
    net(x, torch.rand(1), features)[0, i].sum().backward()
    assert x.grad is not None and features.grad is not None
    return x.grad[0].abs().sum(1), features.grad[0].abs().sum(1)


@pytest.mark.parametrize("i", range(5))
def test_actions_do_not_depend_on_later_actions_or_observations(i: int) -> None:
    to_actions, to_observations = gradients(transformer(), i)
    assert bool((to_actions[: i + 1] > 0).all()) and not bool(to_actions[i + 1 :].any())
    assert bool((to_observations[: i + 1] > 0).all()) and not bool(to_observations[i + 1 :].any())


def test_chunk_from_the_newest_observation_depends_on_the_whole_history() -> None:
    _, to_observations = gradients(transformer(first_action=3), 0)
    assert bool((to_observations > 0).all())


def test_every_action_depends_on_time() -> None:
    net = transformer()
    x, features = torch.randn(1, 5, 3), torch.randn(1, 4, 6)
    change = net(x, torch.tensor([0.1]), features) - net(x, torch.tensor([0.9]), features)
    assert bool((change.abs().sum(-1) > 0).all())
