"""Tests that restored state is on the device of the run: simulated, or `meta` where state needs no generator."""

import pytest
import torch
from meta_device import GPU, SPEC, Elsewhere, rollout

from robopolicy.contrib.control.props import PROPS, PROPSConfig
from robopolicy.contrib.control.stock_wrapper import StockSim, StockWrapperConfig
from robopolicy.contrib.control.subpo import Visited
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

simulated = pytest.importorskip("simulated", exc_type=ImportError)


def made(device: torch.device) -> tuple[Visited, PROPS]:
    """Parts with state in addition to networks and optimisers."""
    with device:
        return Visited(2), PROPS(PROPSConfig(), GaussianPolicy(GaussianConfig(), SPEC), total_updates=2)


def test_restored_rollout_state_is_on_the_device() -> None:
    device = simulated.DEVICE
    (_, saved), (visited, props) = made(torch.device("cpu")), made(device)
    visited.load_state_dict({"places": torch.zeros(3, 4, 2), "count": torch.ones(3, dtype=torch.int64)})
    assert visited.places.device == visited.count.device == device
    props.load_state_dict(saved.state_dict() | {"kept": [vars(rollout(torch.device("cpu")))]})
    assert {props.kept_batches[0].reward.device, props.kept_batches[0].obs["state"].device} == {device}


def test_restored_stock_state_is_on_the_device() -> None:
    stock = StockSim(Elsewhere(), StockWrapperConfig(0.99))
    assert stock.load_state_dict({"sim": {}, "stock": torch.zeros(3, 2)})[stock.key].device == GPU
