"""OGBench benchmark: generation of play data, published settings, and the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ogbench")

from benchmarks.ogbench import play_data
from benchmarks.ogbench.methods import METHODS, TASKS, published_success
from benchmarks.ogbench.study import STUDY, make_data
from benchmarks.study_table import tabulate
from robopolicy.training.compose import compose_config


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


@pytest.mark.parametrize("task", ["scene-task3", "puzzle-3x3-task3", "cube-double-task3"])
@pytest.mark.parametrize("name", list(METHODS))
def test_cells_have_the_published_settings(name: str, task: str) -> None:
    """Networks and settings of ColinQiyangLi/qam (`experiments/reproduce.py`) and ColinQiyangLi/qc."""
    method, domain = METHODS[name], TASKS[task].domain
    config = compose_config([*STUDY.settings(method, task, 7), "out=out", "name=cell"])
    algorithm, critic = config.algorithm, config.algorithm["critic"]
    assert (config.task.name, config.seed) == (f"ogbench/{domain}-singletask-task3-v0", 7)
    assert config.task.reward == ("shaped" if domain == "cube-double" else "sparse")
    assert (config.chunk.horizon, config.chunk.action_horizon, config.policy["steps"]) == (5, 5, 10)
    assert config.policy["hidden"] == critic["hidden"] == [512] * 4
    assert (config.policy["activation"], config.policy["normalization"]) == ("gelu", "identity")
    assert (config.policy["time_dim"], config.policy["init"], critic["init"]) == (1, "xavier", "xavier")
    assert (algorithm["batch_size"], algorithm["gamma"], algorithm["tau"], algorithm["lr"]) == (256, 0.99, 0.005, 3e-4)
    assert (critic["members"], algorithm["rho"] or 0) == ((2, 0) if method.protocol == "qc" else (10, 0.5))
    if method.preset == "fql":
        assert (algorithm["alpha"], algorithm["normalize_q"]) == (300.0, False)
    if method.preset == "ifql":
        puzzle = domain == "puzzle-3x3" and method.protocol == "qam"
        assert algorithm["implicit"]["expectile"] == (0.95 if puzzle else 0.9)
        assert (algorithm["candidates"], algorithm["reduction"], algorithm["ema_decay"]) == (32, "min", 0.0)
    if method.preset == "dsrl":
        assert algorithm["noise_space"]["bound"] == (0.4 if domain == "scene" else 1.0)
        assert (algorithm["target_entropy"], algorithm["distill"], algorithm["train_base"]) == (-12.5, 1.0, True)
    assert config.budget.updates == config.replay.offline_updates == (200_000 if "200k" in name else 100_000)


def test_every_method_has_published_curves() -> None:
    for method in METHODS.values():
        for task in TASKS:
            found = published_success(method, task)
            assert found is not None and 0 <= found[1] <= found[0] + 1e-9 <= found[2] + 2e-9 <= 100.1


def test_table_shows_the_published_success_of_each_task() -> None:
    def cell(seed: int, rate: float) -> dict[str, Any]:
        curve = [(50_000, 0.2), (100_000, rate)]
        return {"method": "qc_ifql", "task": "puzzle-3x3-task1", "seed": seed, "updates": 100_000, "curve": curve} | {
            "precision": "bfloat16",
            "seconds": 7200.0,
        }

    table = tabulate(STUDY, [cell(seed, rate) for seed, rate in enumerate((1.0, 0.9, 0.9, 0.9, 0.8))])
    (row,) = table.rows()
    assert (row["seeds"], row["published"]) == ("5", "100.0% [100.0%, 100.0%]")
    assert row["hours"] == 2.0 and str(row["score [95 %]"]).startswith("90.0% [")
    assert table.entries[0].reproduced is True  # 90 is 10 points below the published interval
    assert tabulate(STUDY, [cell(seed, 0.89) for seed in range(5)]).entries[0].reproduced is False
    assert not STUDY.is_current(cell(0, 1.0) | {"updates": 50_000})


def test_the_first_cell_generates_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def generate(name: str, out: Path, episodes: int, seed: int, processes: int) -> None:
        made.append((name, episodes))
        out.touch()

    monkeypatch.setenv("OGBENCH_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(play_data, "generate", generate)
    make_data("scene")
    make_data("scene")
    assert made == [("scene-v0", 1000)]


def test_the_plan_starts_with_the_default_tasks() -> None:
    keys = STUDY.cell_keys()
    assert keys[0] == ("qc_ifql", "puzzle-3x3-task4", 0) and len(keys) == len(set(keys))
    assert {str(key[0]) for key in keys} == METHODS.keys() - {"qc", "qc_200k", "ifql_200k", "fql_200k", "dsrl_200k"}
