"""Tests of checkpoint chunk sources: their chunks equal the chunks of an evaluation."""

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import PolicyActor
from robopolicy.interop.sources import CheckpointChunkPolicy
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim


def build(name: str, **settings) -> CheckpointChunkPolicy:
    torch.manual_seed(0)
    kind = POLICIES[name]
    config = kind.config_class
    spec = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2, obs_horizon=2)
    return CheckpointChunkPolicy(kind(config(**settings), spec))


@pytest.mark.parametrize("name", ["flow", "gaussian"])
def test_chunks_of_an_episode_equal_the_chunks_of_an_evaluation(name):
    source = build(name)
    actor = PolicyActor(source.policy, batch=1)
    sim = make_sim("toy/point_mass", SimOptions(num_envs=1))
    chunked = ChunkedSim(sim, action_horizon=2, obs_horizon=2)
    obs = chunked.reset(5)
    source.reset(5)
    for decision in range(5):
        expected = actor(sim, obs, *(torch.tensor([number]) for number in (0, 5, decision)))
        chunk = source.chunk({key: value[0].numpy() for key, value in obs.items()})
        np.testing.assert_array_equal(chunk, expected[0].numpy())
        obs = chunked.step(expected).obs
    assert chunk.shape == (4, 2) and chunk.dtype == np.float32


def test_repeated_seed_repeats_the_chunks_and_another_seed_differs():
    source = build("flow")
    obs = {"state": np.zeros((2, 6), np.float32)}
    chunks = {}
    for run, seed in enumerate((1, 1, 2)):
        source.reset(seed)
        chunks[run] = np.stack([source.chunk(obs) for _ in range(2)])
    np.testing.assert_array_equal(chunks[0], chunks[1])
    assert not np.array_equal(chunks[0], chunks[2])
    assert not np.array_equal(chunks[0][0], chunks[0][1])


def test_mismatched_observations_are_refused():
    source = build("gaussian")
    for obs in ({}, {"state": np.zeros(6, np.float32)}):
        with pytest.raises(UserError, match="expects 'state'"):
            source.chunk(obs)
    with pytest.raises(UserError, match="'state' is not finite"):
        source.chunk({"state": np.full((2, 6), np.nan, np.float32)})
    seeing = POLICIES["flow"](POLICIES["flow"].config_class(), PolicySpec({"image.a": (3, 24, 24)}, 1, 2))
    with pytest.raises(UserError, match=r"'image.a' in uint8, found float32"):
        CheckpointChunkPolicy(seeing).chunk({"image.a": np.zeros((1, 3, 24, 24), np.float32)})
    with pytest.raises(UserError, match="cannot continue"):
        source.chunk({"state": np.zeros((2, 6), np.float32)}, prefix=np.zeros((1, 2)))
    assert not source.takes_prefix
