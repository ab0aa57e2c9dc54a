"""Tests of resume devices: a CPU resume point moves to the device of the run. `meta` stands in for a GPU."""

import pytest
import torch
from meta_device import GPU, SPEC, Elsewhere, rollout

from robopolicy.algorithms.common.rollout_batch import RewardNormalizer
from robopolicy.algorithms.gorl import DecoderTrainer, GoRLConfig
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.rollout.on_policy import EpisodeStats
from robopolicy.sim.chunk import ChunkedSim


@pytest.mark.filterwarnings("ignore:.*non-meta parameter")
def test_algorithm_state_moves_to_the_device() -> None:
    scale = RewardNormalizer()
    scale.moments.observe = lambda values: None  # type: ignore[method-assign]
    scale.load_state_dict({"running": torch.zeros(3), "moments": scale.moments.state_dict()})
    scale.update(rollout(GPU), 0.9)
    assert scale.running is not None and scale.running.device == GPU
    saved = DecoderTrainer(FlowPolicy(FlowConfig(), SPEC), GoRLConfig())
    with GPU:
        decoder = DecoderTrainer(FlowPolicy(FlowConfig(), SPEC), GoRLConfig())
    chunks = {"obs": {"state": torch.zeros(5, 1, 1)}, "chunk": torch.zeros(5, 1, 1)}
    decoder.load_state_dict(saved.state_dict() | chunks)
    assert decoder.chunk is not None and decoder.chunk.device == decoder.obs["state"].device == GPU


def test_sampler_and_simulator_state_moves_to_the_device() -> None:
    stats = EpisodeStats(Elsewhere())
    numbers = torch.zeros(3)
    stats.load_state_dict({"return": numbers, "length": numbers.long(), "sums": {"return": (numbers[0], numbers[1])}})
    assert {value.device for value in (stats._running, stats._sums["return"])} == {GPU}
    chunked = ChunkedSim(Elsewhere(), obs_horizon=2)
    history = chunked.load_state_dict({"sim": {}, "history": {"state": torch.zeros(3, 2, 1)}})
    assert history["state"].device == GPU
