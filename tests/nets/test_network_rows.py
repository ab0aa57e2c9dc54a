"""Denoising networks see whole chains at once; times that repeat are embedded once, features serve all iterates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from robopolicy.nets.backbone import BACKBONES, BackboneConfig, make_backbone
from robopolicy.nets.time import TimeEmbedding, network_rows

B, T, H, A, TO, F = 5, 3, 6, 2, 2, 4
TIMES = pytest.mark.parametrize("times", [1, 2])


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """The claims are about rows, not about rounding: the order of sums depends on how many rows there are."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def backbone(kind: str, times: int) -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden": (16, 16), "unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}
    config = BackboneConfig(backbone=kind, **small)  # type: ignore[arg-type]
    return make_backbone(config, action_dim=A, horizon=H, feature_dim=F, obs_horizon=TO, times=times)


def inputs(times: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (T,) if times == 1 else (T, times)
    return tuple(torch.rand(*size, generator=generator) for size in ((B, T, H, A), shape, (B, TO, F)))  # type: ignore[return-value]


@TIMES
@pytest.mark.parametrize("kind", BACKBONES)
def test_chains_are_read_as_their_iterates_one_by_one(kind: str, times: int) -> None:
    network, (x, t, features) = backbone(kind, times), inputs(times)
    found = network(x, t, features)
    assert found.shape == x.shape
    for step in range(T):
        one = network(x[:, step], t[step].expand(B, *t.shape[1:]), features)
        torch.testing.assert_close(found[:, step], one)


@TIMES
@pytest.mark.parametrize("kind", BACKBONES)
def test_one_time_serves_all_rows(kind: str, times: int) -> None:
    network, (x, t, features) = backbone(kind, times), inputs(times)
    repeated = t[:1].expand(B, *t.shape[1:])
    torch.testing.assert_close(network(x[:, 0], t[:1], features), network(x[:, 0], repeated, features))
    torch.testing.assert_close(
        network.representation(x[:, 0], t[:1], features),  # type: ignore[operator]
        network.representation(x[:, 0], repeated, features),  # type: ignore[operator]
    )


@pytest.mark.parametrize("kind", BACKBONES)
def test_gradients_add_up_over_the_rows_that_share_a_time(kind: str) -> None:
    (x, t, features), gradients = inputs(1), []
    weight = torch.rand(x.shape)
    for together in (True, False):
        network = backbone(kind, 1)
        if together:
            loss = (weight * network(x, t, features)).sum()
        else:
            rows = network(x.flatten(0, 1), t.repeat(B), features.repeat_interleave(T, 0))
            loss = (weight.flatten(0, 1) * rows).sum()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)


def test_rows_of_deeper_nests_keep_their_observation() -> None:
    x, features = torch.zeros(2, 3, 4, H, A), torch.arange(2.0).view(2, 1, 1)
    rows, time, seen = network_rows(x, torch.zeros(4, 8), features)
    assert rows.shape == (24, H, A) and time.shape == (24, 8)
    assert seen.flatten().tolist() == [0.0] * 12 + [1.0] * 12


def test_times_that_fit_no_row_are_refused() -> None:
    x, _, features = inputs(1)
    with pytest.raises(RuntimeError, match="expand"):
        network_rows(x, torch.zeros(T + 1, 8), features)


@TIMES
def test_embeddings_keep_the_shape_of_their_times(times: int) -> None:
    shape = (4, 3) if times == 1 else (4, 3, times)
    assert TimeEmbedding(16, times)(torch.rand(shape)).shape == (4, 3, 16)


def test_a_level_of_one_step_keeps_its_values() -> None:
    torch.manual_seed(0)
    config = BackboneConfig(backbone="unet", unet_channels=(8,))
    network = make_backbone(config, action_dim=A, horizon=1, feature_dim=F, obs_horizon=1)
    x, features = torch.randn(1, 1, A), torch.randn(1, 1, F)
    one, other = (network(value, torch.zeros(1), features) for value in (x, -x))
    assert not torch.allclose(one, other, atol=1e-3)
