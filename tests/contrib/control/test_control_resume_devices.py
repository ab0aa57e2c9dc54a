"""What algorithms and wrappers of this theme remember goes back to where a run computes. `meta` stands in for a GPU."""

import pytest
import torch
from meta_device import GPU, SPEC, Elsewhere, rollout

from robopolicy.contrib.control.props import PROPS, PROPSConfig
from robopolicy.contrib.control.stock_wrapper import StockSim, StockWrapperConfig
from robopolicy.contrib.control.subpo import Visited
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy


def made(device: torch.device) -> tuple[Visited, PROPS]:
    """Parts that remember more than networks and optimisers."""
    with device:
        return Visited(2), PROPS(PROPSConfig(), GaussianPolicy(GaussianConfig(), SPEC), total_updates=2)


@pytest.mark.filterwarnings("ignore:.*non-meta parameter")
def test_what_an_algorithm_remembers_of_its_play() -> None:
    (_, saved), (visited, props) = made(torch.device("cpu")), made(GPU)
    visited.load_state_dict({"places": torch.zeros(3, 4, 2), "count": torch.ones(3, dtype=torch.int64)})
    assert visited.places.device == visited.count.device == GPU
    props.load_state_dict(saved.state_dict() | {"kept": [vars(rollout(torch.device("cpu")))]})
    assert {props.kept_batches[0].reward.device, props.kept_batches[0].obs["state"].device} == {GPU}


def test_what_the_stock_wrapper_remembers_of_running_episodes() -> None:
    stock = StockSim(Elsewhere(), StockWrapperConfig(0.99))
    assert stock.load_state_dict({"sim": {}, "stock": torch.zeros(3, 2)})[stock.key].device == GPU
