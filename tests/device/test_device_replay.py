"""Tests of replay on the simulated device: contents and windows equal those on the CPU, and nothing waits."""

from typing import Any

import numpy as np
import pytest
import torch
from small_replay import play, request
from torch import Tensor

from robopolicy.data.batches import Transitions
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.priorities import FLOOR, DevicePriorities, Priorities
from robopolicy.data.replay import MixedReplay, Replay
from robopolicy.errors import UserError
from robopolicy.policies.base import Sample
from robopolicy.rollout.off_policy import ReplaySampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

simulated = pytest.importorskip("simulated", exc_type=ImportError)
DEVICE = simulated.DEVICE
LANES, LENGTH = 4, 30
KINDS: list[dict[str, Any]] = [
    {},
    {"horizon": 4, "steps": 2, "obs_horizon": 3},
    {"horizon": 2, "steps": 5},
    {"horizon": 3, "steps": 3, "chunk_starts_only": True},
]


def pair(count: int = 100, **settings: Any) -> tuple[Replay, Replay]:
    """Buffers on the CPU and on the device with the same random steps; lanes pause, the rings are full."""
    both = tuple(Replay(LANES * LENGTH, LANES, gamma=0.9, device=d, **settings) for d in (torch.device("cpu"), DEVICE))
    rng = np.random.default_rng(0)
    for step in range(count):
        state = torch.from_numpy(rng.standard_normal((LANES, 2))).float()
        ends = torch.from_numpy(rng.random((2, LANES)) < 0.08)
        active = torch.from_numpy(rng.random(LANES) < 0.8)
        for replay in both:
            replay.add(
                torch.arange(LANES),
                {"state": state},
                -state,
                state[:, 0],
                ends[0],
                ends[1],
                {"state": state + 1},
                decision=step % 3 == 0,
                record={"noise": state},
                active=active,
            )
    return both[0], both[1]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def columns(batch: Transitions) -> dict[str, Tensor]:
    """All tensors of a batch by name, on the CPU."""
    rows: dict[str, Any] = dict(vars(batch))
    for name in ("obs", "next_obs", "record"):
        rows |= {f"{name}.{key}": value for key, value in rows.pop(name).items()}
    return {key: value.cpu() for key, value in rows.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_windows_on_the_device_equal_the_windows_on_the_cpu(kind: dict[str, Any]) -> None:
    host, device = pair()
    wanted = request(batch_size=200, gamma=0.9, **kind)
    batch = device.sample(wanted, generator())
    assert batch.reward.device == DEVICE
    usable = host._usable(batch.index.cpu().numpy(), wanted)
    assert usable.all() and len(batch.index.unique()) > 20
    expected = columns(host.take(batch.index.cpu(), wanted))
    for key, value in columns(batch).items():
        torch.testing.assert_close(value, expected[key], equal_nan=True, msg=key)


def test_returns_to_go_are_computed_by_scans() -> None:
    replay = Replay(30, gamma=0.5, device=DEVICE)
    play(replay, 0, 3, "terminated")
    play(replay, 10, 2, "truncated")
    play(replay, 20, 2)
    returns = replay.take(torch.tensor([0, 1, 2, 4, 5, 7]), request()).returns
    assert returns[:3].tolist() == [1 + 0.5 * (2 + 0.5 * 3), 2 + 0.5 * 3, 3]
    assert returns[3:].isnan().all()
    ring = Replay(4, gamma=0.5, device=DEVICE)
    play(ring, 0, 9, "terminated")  # slots 0 and 1 hold 8 and the last observation, 2 and 3 hold 6 and 7
    assert ring.take(torch.tensor([0, 3, 2]), request()).returns.tolist() == [9, 12.5, 13.25]


def test_draws_on_the_device_are_uniform_over_the_usable_windows() -> None:
    _, device = pair()
    index = device.sample(request(batch_size=20_000), generator()).index
    counts = torch.bincount(index)[index.unique()]
    expected = 20_000 / len(counts)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi < len(counts) + 5 * (2 * len(counts)) ** 0.5
    aged = request(batch_size=400, age_quantile=lambda uniform: uniform / 4)
    index = device.sample(aged, generator()).index
    assert int(device._newer(index // LENGTH, index % LENGTH).min()) >= 3 / 4 * LENGTH - 1


def test_priorities_on_the_device_equal_the_sum_tree() -> None:
    rng, tree, sums = np.random.default_rng(0), Priorities(50, 0.7), DevicePriorities(50, 0.7, device=DEVICE)
    active = rng.random(50) < 0.8
    tree.add(np.arange(50), active=active)
    sums.add(torch.arange(50).to(DEVICE), active=torch.from_numpy(active).to(DEVICE))
    index, error, own = rng.permutation(50)[:20], rng.exponential(size=20), rng.random(20) < 0.7
    tree.update(index, error, own)
    sums.update(*(torch.from_numpy(value).to(DEVICE) for value in (index, error, own)))
    uniform = rng.random(300)
    drawn = tree.draw(uniform)
    assert sums.draw(torch.from_numpy(uniform).to(DEVICE)).tolist() == drawn.tolist()
    weights = sums.weights(torch.from_numpy(drawn).to(DEVICE), torch.tensor(50).to(DEVICE))
    np.testing.assert_allclose(weights.cpu().numpy(), tree.weights(drawn, 50), rtol=1e-12)
    loaded = Priorities(50, 0.7)
    loaded.load_state_dict(_on_cpu(sums.state_dict()))
    np.testing.assert_allclose(loaded.tree, tree.tree, rtol=1e-12)
    assert loaded.largest == tree.largest > (1 + FLOOR) ** 0.7


def dataset() -> Replay:
    arrays = {"state": np.zeros((40, 2)), "action": np.zeros((40, 2)), "reward": np.ones(40)}
    return Replay.from_episodes(Episodes.from_list([Episode(arrays)], 0.1), gamma=0.9, device=DEVICE)


@pytest.mark.parametrize("prioritized", [0.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_drawn_without_waits(kind: dict[str, Any], prioritized: float) -> None:
    _, replay = pair(prioritized=prioritized)
    wanted = request(**kind)
    with simulated.record() as first:
        replay.sample(wanted, generator())
    assert first.waits <= 1, first.places()  # whether there is a window
    with simulated.record() as found:
        batch = replay.sample(wanted, generator(), batches=2)
        replay.update_priorities(batch, batch.reward)
    assert found.waits == 0 and found.launches <= 160, found.places()
    if not kind and not prioritized:
        assert found.launches <= 120, found.places()


def test_mixed_batches_are_drawn_without_waits() -> None:
    _, online = pair()
    mixed = MixedReplay(dataset(), online, 0.25)
    mixed.sample(request(), generator())
    with simulated.record() as found:
        batch = mixed.sample(request(), generator(), batches=5)
    assert found.waits == 0, found.places()
    for part in batch.split(8):
        assert part.online.tolist() == [False] * 2 + [True] * 6


def test_steps_are_written_without_waits() -> None:
    _, replay = pair()
    step = [torch.zeros(LANES, 2, device=DEVICE), torch.zeros(LANES, device=DEVICE)]
    flag, lanes = torch.ones(LANES, dtype=torch.bool, device=DEVICE), torch.arange(LANES, device=DEVICE)
    obs = {"state": step[0]}
    with simulated.record() as found:
        replay.add(lanes, obs, step[0], step[1], flag, flag, obs, record={"noise": step[0]}, active=flag)
    assert found.waits == 0 and found.launches <= 45, found.places()


def test_a_device_without_a_window_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        Replay(20, device=DEVICE).sample(request(), generator())
    replay = Replay(20, device=DEVICE)
    play(replay, 0, 5)
    with pytest.raises(UserError, match="has no window of 9 steps"):
        replay.sample(request(steps=9), generator())


@pytest.mark.parametrize("prioritized", [0.0, 0.6])
def test_states_move_between_the_devices(prioritized: float) -> None:
    host, device = pair(prioritized=prioritized)
    for source, other in ((host, DEVICE), (device, torch.device("cpu"))):
        copy = Replay(LANES * LENGTH, LANES, gamma=0.9, device=other, prioritized=prioritized)
        copy.load_state_dict(_on_cpu(source.state_dict()))
        wanted = request(horizon=3, steps=2, obs_horizon=2)
        index = torch.arange(LANES * LENGTH)
        index = index[torch.from_numpy(host._usable(index.numpy(), wanted))]
        one, two = columns(source.take(index, wanted)), columns(copy.take(index, wanted))
        for key, value in one.items():
            torch.testing.assert_close(value, two[key], equal_nan=True, msg=key)


def test_a_restored_device_buffer_continues_identically() -> None:
    _, device = pair(prioritized=0.6)
    copy = Replay(LANES * LENGTH, LANES, gamma=0.9, device=DEVICE, prioritized=0.6)
    copy.load_state_dict(_on_cpu(device.state_dict()))
    one, two = (columns(replay.sample(request(batch_size=64), generator(7))) for replay in (device, copy))
    for key, value in one.items():
        torch.testing.assert_close(value, two[key], rtol=0, atol=0, equal_nan=True)


def _on_cpu(state: Any) -> Any:
    """A state as a resume file returns it."""
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return state.cpu() if isinstance(state, Tensor) else state


@pytest.mark.parametrize("steps", [1, 2])
def test_collecting_on_the_device_reads_one_number(steps: int) -> None:
    sim = ChunkedSim(make_sim("toy/point_mass", SimOptions(num_envs=LANES, device="simulated")), action_horizon=steps)
    sampler = ReplaySampler(sim, Replay(200, LANES, device=DEVICE))

    def act(obs: dict[str, Tensor], *, generator: torch.Generator) -> Sample:
        return Sample.unscored(torch.randn(LANES, steps, 2, device=DEVICE, generator=generator))

    sampler.collect(act, 3)
    with simulated.record() as found:
        sampler.collect(act, 3)
    assert sampler.env_steps == 6 * steps * LANES
    waits = {place: n for (_, _, place), n in found.events.items() if "/data/" in place or "off_policy" in place}
    assert sum(waits.values()) <= 1, found.places()
