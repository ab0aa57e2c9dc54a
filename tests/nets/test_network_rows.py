"""Tests of denoising networks on whole chains: repeated times and features are shared by all iterates."""

from collections.abc import Iterator

import pytest
import torch
from backbone_rules import (
    A,
    F,
    H,
    T,
    check_gradients_add_up_over_the_rows_that_share_a_time,
    check_one_time_serves_all_rows,
    check_reads_chains_as_their_iterates,
    inputs,
)

from robopolicy.nets.backbone import BACKBONES, BackboneConfig, make_backbone
from robopolicy.nets.time import TimeEmbedding, network_rows

TIMES = pytest.mark.parametrize("times", [1, 2])


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Use double precision, since rounding depends on the number of rows."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@TIMES
@pytest.mark.parametrize("kind", BACKBONES.product())
def test_chain_outputs_equal_the_outputs_of_single_iterates(kind: str, times: int) -> None:
    check_reads_chains_as_their_iterates(kind, times)


@TIMES
@pytest.mark.parametrize("kind", BACKBONES.product())
def test_one_time_for_all_rows_equals_repeated_times(kind: str, times: int) -> None:
    check_one_time_serves_all_rows(kind, times)


@pytest.mark.parametrize("kind", BACKBONES.product())
def test_gradients_sum_over_rows_with_a_shared_time(kind: str) -> None:
    check_gradients_add_up_over_the_rows_that_share_a_time(kind)


def test_nested_rows_keep_their_observation() -> None:
    x, features = torch.zeros(2, 3, 4, H, A), torch.arange(2.0).view(2, 1, 1)
    rows, time, seen = network_rows(x, torch.zeros(4, 8), features)
    assert rows.shape == (24, H, A) and time.shape == (24, 8)
    assert seen.flatten().tolist() == [0.0] * 12 + [1.0] * 12


def test_mismatched_number_of_times_is_refused() -> None:
    x, _, features = inputs(1)
    with pytest.raises(RuntimeError, match="expand"):
        network_rows(x, torch.zeros(T + 1, 8), features)


@TIMES
def test_embeddings_keep_the_shape_of_their_times(times: int) -> None:
    shape = (4, 3) if times == 1 else (4, 3, times)
    assert TimeEmbedding(16, times)(torch.rand(shape)).shape == (4, 3, 16)


def test_unet_with_a_horizon_of_one_depends_on_its_input() -> None:
    torch.manual_seed(0)
    config = BackboneConfig(backbone="unet", unet_channels=(8,))
    network = make_backbone(config, action_dim=A, horizon=1, feature_dim=F, obs_horizon=1)
    x, features = torch.randn(1, 1, A), torch.randn(1, 1, F)
    one, other = (network(value, torch.zeros(1), features) for value in (x, -x))
    assert not torch.allclose(one, other, atol=1e-3)
