"""Tests of the replay benchmark: every buffer writes and draws."""

import pytest

from benchmarks import replay
from robopolicy.device import CPU


def test_every_buffer_is_timed() -> None:
    pytest.importorskip("stable_baselines3")
    rows, figures = replay.compare(CPU, ((4, 8, 200),), turns=1)
    assert [row["windows"] for row in rows] == [*replay.KINDS, replay.PEER]
    assert all(time > 0 for times in figures["4"].values() for time in times.values())
