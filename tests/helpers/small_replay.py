"""A replay buffer with known contents: observations, actions and rewards encode the step, so windows are readable."""

from typing import Any

import numpy as np
import torch

from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.replay import MixedReplay, Replay


def request(**settings: Any) -> ReplaySampleSpec:
    """A sample request with small defaults."""
    return ReplaySampleSpec(**{"batch_size": 8, "horizon": 1, "steps": 1, "gamma": 0.5} | settings)


def play(replay: Replay, start: int, count: int, end: str = "", lane: int = 0, **more: Any) -> None:
    """Add `count` steps; step i has observation start + i, action -(start + i) and reward start + i + 1."""
    for x in range(start, start + count):
        last = x == start + count - 1
        replay.add(
            torch.tensor([lane]),
            {"state": torch.tensor([[float(x)]])},
            torch.tensor([[-float(x)]]),
            torch.tensor([x + 1.0]),
            torch.tensor([last and end == "terminated"]),
            torch.tensor([last and end == "truncated"]),
            {"state": torch.tensor([[x + 1.0]])},
            **more,
        )


def window(replay: Replay, slot: int, **settings: Any) -> Transitions:
    """The window that starts at `slot`."""
    return replay.take(torch.tensor([slot]), request(**settings))


def generator(seed: int = 0) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


def drawn(replay: Replay | MixedReplay, **settings: Any) -> list[int]:
    """The distinct start slots of 40 sampled batches."""
    return sorted(set(replay.sample(request(**settings), generator(), batches=40).index.tolist()))


def state(batch: Transitions) -> list[float]:
    """Observations of the first row, oldest first."""
    return batch.obs["state"][0, :, 0].tolist()


def successor(batch: Transitions) -> list[float]:
    """Next observations of the first row, oldest first."""
    return batch.next_obs["state"][0, :, 0].tolist()


def random_replay(seed: int = 0, **settings: Any) -> Replay:
    """A replay buffer with three lanes and episodes of random length, filled far beyond the capacity."""
    rng = np.random.default_rng(seed)
    replay = Replay(90, lanes=3, gamma=0.9, **settings)
    time, running = np.zeros(3, int), np.zeros(3, int)
    for _ in range(120):
        lanes = np.flatnonzero(rng.random(3) < 0.8)
        ends = rng.random(len(lanes)) < 0.15
        kind = rng.random(len(lanes)) < 0.5
        value = torch.tensor(1000.0 * running[lanes] + time[lanes])[:, None].float()
        replay.add(
            torch.from_numpy(lanes),
            {"state": value},
            -value,
            value[:, 0],
            torch.from_numpy(ends & kind),
            torch.from_numpy(ends & ~kind),
            {"state": value + 1},
        )
        time[lanes] += 1
        running[lanes[ends]] += 1
        time[lanes[ends]] = 0
    return replay
