"""OGBench benchmark: generation of play data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ogbench")

from benchmarks.ogbench import play_data


def test_cube_stays_visible_unless_it_leaves_the_table_outside_the_drawer() -> None:
    def positions(y: float, z: float) -> Any:
        qpos = np.zeros((3, 25))
        qpos[:, 16] = 0.02
        qpos[1, 15:17] = y, z
        return qpos

    assert play_data.cube_stays_visible(positions(0.28, 0.02))
    assert not play_data.cube_stays_visible(positions(0.29, 0.02))
    assert play_data.cube_stays_visible(positions(-0.35, 0.07))  # in the drawer
    assert not play_data.cube_stays_visible(positions(-0.35, 0.02))
    assert not play_data.cube_stays_visible(positions(-0.35, 0.09))


def in_this_process(function: Callable[[Any], Any], items: Sequence[Any], *, jobs: int) -> Iterator[tuple[Any, Any]]:
    for item in items:
        future: Future[Any] = Future()
        future.set_result(function(item))
        yield item, future


def test_generated_files_have_the_layout_of_ogbench_and_continue_from_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(play_data, "STEPS", 12)
    monkeypatch.setattr(play_data, "BLOCK", 4)
    monkeypatch.setattr(play_data, "parallel_map", in_this_process)
    play_data.make_env.cache_clear()
    out = tmp_path / "cube-single-play-v0.npz"
    first = play_data.play_episode("cube-single-v0", 3)
    assert len(first["observations"]) == 12 and first["terminals"].tolist() == 11 * [False] + [True]
    play_data.write_block("cube-single-v0", 3, out.with_suffix(".blocks"), range(4))
    play_data.generate("cube-single-v0", out, episodes=10, seed=3, processes=1)
    train, val = np.load(out), np.load(tmp_path / "cube-single-play-v0-val.npz")
    assert {key: (train[key].shape, train[key].dtype) for key in train.files} == {
        "observations": ((120, 28), np.float32),
        "actions": ((120, 5), np.float32),
        "terminals": ((120,), np.bool_),
        "qpos": ((120, 21), np.float32),
        "qvel": ((120, 20), np.float32),
    }
    assert len(val["actions"]) == 12 and not out.with_suffix(".blocks").exists()
    assert all(np.array_equal(train[key][:12], first[key]) for key in first)
    alone = play_data.play_episode("cube-single-v0", 3 + 10)
    assert all(np.array_equal(val[key], alone[key]) for key in alone)
    play_data.make_env.cache_clear()
