"""Tests of imitation data on the simulated device: the CPU's minibatches, gathered or copied without waits."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.device import CPU, move

simulated = pytest.importorskip("simulated", exc_type=ImportError)
DEVICE = simulated.DEVICE


def sampler(device: torch.device) -> ChunkSampler:
    rng = np.random.default_rng(0)
    arrays = {"state": rng.standard_normal((60, 3)), "image.front": rng.integers(0, 256, (60, 3, 96, 96), np.uint8)}
    episode = Episode(arrays | {"action": rng.standard_normal((60, 2))}, "toy", 0)
    options = {"horizon": 4, "obs_horizon": 2, "batch_size": 16, "lookahead_steps": 2}
    return ChunkSampler(Episodes.from_list([episode, episode], 0.1), weight=rng.random(120), device=device, **options)


@pytest.mark.parametrize("free", [10**9, 1000])
def test_minibatches_on_the_device_equal_those_on_the_cpu(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.simulated, "mem_get_info", lambda device: (free, free), raising=False)  # type: ignore[attr-defined]
    found, expected = sampler(DEVICE), sampler(CPU)
    assert found.take(torch.arange(2)).chunk.device == (DEVICE if free > 10**6 else CPU)
    next(found), next(expected)
    for _ in range(9):  # the second epoch begins
        with simulated.record() as counted:
            batch = move(next(found), DEVICE)
        assert counted.waits == 0 and counted.launches <= 20, counted.places()
        torch.testing.assert_close(asdict(move(batch, CPU)), asdict(next(expected)))
    assert found.epoch == 1 and found.state_dict() == expected.state_dict()
