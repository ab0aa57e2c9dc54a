"""Tests of the chunk buffer: time stamps align the executed actions for any order of arrival."""

import math

import numpy as np
import pytest

from robopolicy.deploy.chunk_buffer import BLENDINGS, DECAY, ChunkBuffer, check_delay, delay_steps
from robopolicy.errors import UserError

DT = 0.02
EVERY = pytest.mark.parametrize("blending", sorted(BLENDINGS))


def at(observed: float, horizon: int = 8, dt: float = DT) -> np.ndarray:
    """A chunk whose actions are their own due times."""
    return (observed + dt * np.arange(horizon))[:, None]


def executed(buffer: ChunkBuffer, now: float) -> float | None:
    action = buffer.action(now)
    return None if action is None else float(action[0])


@EVERY
def test_each_tick_executes_the_row_of_its_time(blending):
    buffer = ChunkBuffer(DT, 1, blending)
    assert executed(buffer, 5.0) is None and buffer.remaining(5.0) == 0.0
    buffer.put(at(5.0), 5.0)
    assert [round(executed(buffer, 5.0 + k * DT), 9) for k in range(8)] == [round(5.0 + k * DT, 9) for k in range(8)]
    assert executed(buffer, 5.0 + 7.99 * DT) == pytest.approx(5.0 + 7 * DT)
    assert executed(buffer, 5.0 + 8 * DT) is None  # exhausted


@EVERY
def test_actions_match_their_time_for_any_order_of_arrival(blending):
    """All chunks agree on every tick, so every blending must execute exactly that action."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        dt, start = float(rng.uniform(0.001, 0.2)), float(rng.uniform(0, 1e6))
        horizon = int(rng.integers(2, 20))
        observed = start + dt * np.sort(rng.choice(60, 12, replace=False))
        arrival = observed + dt * rng.uniform(0, 1.5 * horizon, 12)  # late, out of order, some too late to execute
        events = sorted((a + again * dt, o) for a, o in zip(arrival, observed, strict=True) for again in (0, 1))
        buffer = ChunkBuffer(dt, 1, blending)
        for tick in range(90):
            now = start + tick * dt
            while events and events[0][0] <= now:
                _, stamp = events.pop(0)  # every chunk comes twice
                buffer.put(at(stamp, horizon, dt), stamp)
            over = (now - observed) / dt > horizon - 1e-6
            covered = (arrival <= now) & (observed <= now + 1e-9) & ~over
            assert (buffer.remaining(now) > 1e-6 * dt) == any(covered)
            action = executed(buffer, now)
            assert (action is not None) == any(covered)
            assert action is None or action == pytest.approx(now, abs=1e-3 * dt)


def test_replace_takes_the_newest_observation_not_the_newest_arrival():
    buffer = ChunkBuffer(1.0, 1)
    buffer.put(np.full((6, 1), 1.0), 10.0)
    buffer.put(np.full((6, 1), 3.0), 12.0)
    buffer.put(np.full((6, 1), 2.0), 11.0)  # arrives after a newer chunk
    buffer.put(np.full((6, 1), 9.0), 12.0)  # the same observation again
    assert executed(buffer, 13.0) == 3.0


def test_hold_executes_a_chunk_to_its_end_and_then_the_newest():
    buffer = ChunkBuffer(1.0, 1, "hold")
    for observed in (0.0, 2.0, 3.0):
        buffer.put(np.full((4, 1), observed), observed)
        assert executed(buffer, observed) == 0.0
    assert [executed(buffer, float(t)) for t in (4, 5, 6, 7)] == [3.0, 3.0, 3.0, None]


def test_ensemble_has_the_weights_of_act():
    buffer = ChunkBuffer(1.0, 2, "ensemble")
    chunks = np.random.default_rng(0).normal(size=(3, 4, 2))
    for observed in (2, 0, 1):
        buffer.put(chunks[observed], float(observed))
    weights = np.exp(-DECAY * np.arange(3))  # the oldest weighs most
    expected = (weights[0] * chunks[0, 2] + weights[1] * chunks[1, 1] + weights[2] * chunks[2, 0]) / weights.sum()
    np.testing.assert_allclose(buffer.action(2.0), expected, rtol=1e-12)
    np.testing.assert_allclose(buffer.action(5.0), chunks[2, 3], rtol=1e-12)


def test_real_time_chunking_executes_the_committed_actions():
    rng = np.random.default_rng(0)
    for _ in range(50):
        delay, early = 3, int(rng.integers(0, 4))  # the chunk may arrive before the expected delay
        buffer = ChunkBuffer(DT, 2, "rtc")
        first, second = rng.normal(size=(2, 8, 2))
        buffer.put(first, 0.0)
        now = 4 * DT + rng.uniform(-0.4, 0.4) * DT  # observations are not aligned with the ticks
        buffer.action(now)
        prefix = buffer.committed(now, delay)
        np.testing.assert_array_equal(prefix, first[4:7])
        seen = []
        for step in range(8):
            if step == early:
                buffer.put(second, now)
            seen.append(buffer.action(now + (step + 0.5) * DT))
        np.testing.assert_array_equal(seen, [*first[4:7], *second[3:]])


def test_committed_actions_end_with_the_chunk():
    buffer = ChunkBuffer(1.0, 1, "rtc")
    assert buffer.committed(0.0, 3).shape == (0, 1)
    buffer.put(np.arange(4.0)[:, None], 0.0)
    assert buffer.committed(2.0, 3).flatten().tolist() == [2.0, 3.0]
    buffer.put(np.full((1, 1), 7.0), 2.0)  # shorter than the committed actions
    assert executed(buffer, 2.0) == 2.0
    plain = ChunkBuffer(1.0, 1)
    plain.put(np.arange(4.0)[:, None], 0.0)
    plain.committed(2.0, 2)
    plain.put(np.full((4, 1), 7.0), 2.0)
    assert executed(plain, 2.0) == 7.0


@EVERY
def test_clock_jumps_never_execute_the_row_of_another_time(blending):
    buffer = ChunkBuffer(DT, 1, blending)
    buffer.put(at(100.0), 100.0)
    assert executed(buffer, 100.0 - 0.5 * DT) == 100.0  # a tick that started just before the observation
    assert executed(buffer, 1e6) is None  # forwards
    buffer.put(at(100.0), 100.0)
    assert executed(buffer, 50.0) is None and buffer.remaining(50.0) == 0.0  # backwards
    assert executed(buffer, 100.0) is None  # back in time, the old chunk is not used again
    buffer.put(at(50.1), 50.1)
    assert executed(buffer, 50.1) == 50.1


@EVERY
def test_bad_chunks_are_refused_and_change_nothing(blending):
    buffer = ChunkBuffer(DT, 2, blending)
    good = np.ones((4, 2), np.float32)
    buffer.put(good, 1.0)
    good[:] = 7.0  # the buffer has its own copy
    others = [np.ones((4, 2), kind) for kind in (complex, bool, "U1", "M8[s]", object)]
    shapes = [np.ones((4, 3)), np.ones(4), np.ones((0, 2)), np.ones((4, 2, 1))]
    for bad in (*others, *shapes, np.full((4, 2), np.nan), np.full((4, 2), -np.inf)):
        with pytest.raises(UserError, match=r"shape \(H, 2\)|non-finite") as refusal:
            buffer.put(bad, 1.0 + DT)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="non-finite"):
        buffer.put(np.ones((4, 2)), math.nan)
    action = buffer.action(1.0 + DT)
    assert action.tolist() == [1.0, 1.0] and action.dtype == np.float64
    action[:] = 5.0
    assert buffer.action(1.0 + DT).tolist() == [1.0, 1.0]
    buffer.clear()
    assert buffer.action(1.0 + DT) is None


@EVERY
@pytest.mark.parametrize("kind", ["i1", "u8", "f2", ">f4"])
def test_numbers_of_any_dtype_are_executed_as_floats(blending, kind):
    buffer = ChunkBuffer(DT, 1, blending)
    buffer.put(np.arange(8, dtype=kind)[:, None], 2.0)
    assert [executed(buffer, 2.0 + k * DT) for k in range(8)] == list(range(8))


@EVERY
def test_executed_actions_are_within_the_range_of_the_chunks(blending):
    """Random chunks of one action dimension that overlap, repeat and arrive out of order, on a clock with jitter."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        buffer, put, now = ChunkBuffer(DT, 1, blending), {0.0: 0.0}, 5.0
        for _ in range(200):
            now += DT * rng.choice([0.0, 1.0, 1.0, rng.uniform(0, 3), -0.4])
            observed = now + DT * rng.integers(-12, 2)
            if rng.random() < 0.3:
                put.setdefault(observed, rng.uniform(-1, 1))  # the first chunk of an observation counts
                buffer.put(np.full((int(rng.integers(1, 9)), 1), put[observed]), observed)
            action = executed(buffer, now)
            active = [value for stamp, value in put.items() if -1 <= (now - stamp) / DT + 1e-6 < 9]
            assert action is None or min(active) - 1e-12 <= action <= max(active) + 1e-12
            assert 0.0 <= buffer.remaining(now) <= 9 * DT


def test_memory_does_not_grow():
    buffer = ChunkBuffer(DT, 1, "ensemble")
    for tick in range(2000):
        buffer.put(at(tick * DT), tick * DT)
        buffer.action(tick * DT)
    assert len(buffer._chunks) <= 8


def test_next_chunk_is_requested_in_time():
    buffer = ChunkBuffer(DT, 1)
    assert buffer.due(0.0, 4)
    buffer.put(at(0.0), 0.0)
    assert [buffer.due(k * DT, 4) for k in (0, 3, 4, 7)] == [False, False, True, True]
    assert buffer.due(100.0, 10_000)  # exhausted
    assert [delay_steps(latency, DT) for latency in (0.0, 0.001, 0.02, 0.06, 0.061)] == [0, 1, 1, 3, 4]


def test_chunks_that_cannot_cover_their_inference_are_refused():
    check_delay(0, 1, 1)
    check_delay(4, 4, 8)
    check_delay(3, 5, 8)
    for delay, action_horizon, horizon in [(4, 3, 8), (4, 5, 8), (15, 8, 8), (1, 1, 1)]:
        with pytest.raises(UserError, match=f"{delay} <= action_horizon <= {horizon - delay}"):
            check_delay(delay, action_horizon, horizon)


@pytest.mark.parametrize(("dt", "blending", "message"), [(0.0, "hold", "positive"), (DT, "replce", "'replace'")])
def test_invalid_settings_are_refused(dt, blending, message):
    with pytest.raises(UserError, match=message):
        ChunkBuffer(dt, 1, blending)
