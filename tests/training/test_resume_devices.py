"""A resume point lies on the CPU; what it holds goes back to where the run computes. `meta` stands in for a GPU."""

from typing import Any

import pytest
import torch

from robopolicy.algorithms.frames.on_policy import ReturnScale
from robopolicy.algorithms.gorl import DecoderFit, GoRLConfig
from robopolicy.contrib.control.props import PROPS, PROPSConfig
from robopolicy.contrib.control.stock_wrapper import StockConfig, StockSim
from robopolicy.contrib.control.subpo import Visited
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.on_policy import EpisodeTally
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import SimSpec, TensorSpec, VectorSim

GPU = torch.device("meta")
SPEC = PolicySpec({"state": (1,)}, 1)


class Elsewhere(VectorSim):
    """Three environments of which nothing is known but where they are."""

    def __init__(self) -> None:
        bound = torch.ones(1)
        self.spec = SimSpec("test/elsewhere", {"state": TensorSpec((1,))}, -bound, bound, 0.1, 100)
        self.num_envs, self.device = 3, GPU

    def reset(self, seed: Any = 0) -> dict[str, torch.Tensor]:
        return {"state": torch.zeros(3, 1, device=GPU)}

    def step(self, action: torch.Tensor, active: torch.Tensor | None = None) -> Any:
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> dict[str, torch.Tensor]:
        return self.reset()


def rollout(device: torch.device) -> Rollout:
    """Four decisions of three environments."""
    with device:
        flags, ones = torch.zeros(4, 3, dtype=torch.bool), torch.ones(4, 3)
        last = {"state": torch.zeros(3, 1, 1)}
        return Rollout({"state": torch.zeros(4, 3, 1, 1)}, {}, ones, ones, ones.long(), flags, flags, last, last)


def made(device: torch.device) -> tuple[Visited, PROPS, DecoderFit]:
    """Parts that remember more than networks and optimisers."""
    with device:
        props = PROPS(PROPSConfig(), GaussianPolicy(GaussianConfig(), SPEC), total_updates=2)
        return Visited(2), props, DecoderFit(FlowPolicy(FlowConfig(), SPEC), GoRLConfig())


@pytest.mark.filterwarnings("ignore:.*non-meta parameter")
def test_what_an_algorithm_remembers_of_its_play() -> None:
    scale = ReturnScale()
    scale.moments.observe = lambda values: None  # type: ignore[method-assign]
    scale.load_state_dict({"running": torch.zeros(3), "moments": scale.moments.state_dict()})
    scale.observe(rollout(GPU), 0.9)
    assert scale.running is not None and scale.running.device == GPU
    saved = made(torch.device("cpu"))
    visited, props, decoder = made(GPU)
    visited.load_state_dict({"places": torch.zeros(3, 4, 2), "count": torch.ones(3, dtype=torch.int64)})
    assert visited.places.device == visited.count.device == GPU
    props.load_state_dict(saved[1].state_dict() | {"kept": [vars(rollout(torch.device("cpu")))]})
    assert {props.kept[0].reward.device, props.kept[0].obs["state"].device} == {GPU}
    chunks = {"obs": {"state": torch.zeros(5, 1, 1)}, "chunk": torch.zeros(5, 1, 1)}
    decoder.load_state_dict(saved[2].state_dict() | chunks)
    assert decoder.chunk is not None and decoder.chunk.device == decoder.obs["state"].device == GPU


def test_what_a_sampler_and_a_simulator_remember_of_running_episodes() -> None:
    tally = EpisodeTally(Elsewhere())
    numbers = torch.zeros(3)
    tally.load_state_dict({"return": numbers, "length": numbers.long(), "sums": {"return": (numbers[0], numbers[1])}})
    assert {value.device for value in (tally._return, tally._length, *tally._sums["return"])} == {GPU}
    chunked = ChunkedSim(Elsewhere(), obs_horizon=2)
    history = chunked.load_state_dict({"sim": {}, "history": {"state": torch.zeros(3, 2, 1)}})
    assert history["state"].device == GPU
    stock = StockSim(Elsewhere(), StockConfig(0.99))
    assert stock.load_state_dict({"sim": {}, "stock": torch.zeros(3, 2)})[stock.key].device == GPU
