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
from benchmarks.ogbench.cell import settings
from benchmarks.ogbench.methods import DOMAINS, METHODS, TASKS, published
from benchmarks.ogbench.table import BUDGETS, figures, rows
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


@pytest.mark.parametrize("domain", list(DOMAINS))
@pytest.mark.parametrize("name", list(METHODS))
def test_cells_have_the_published_settings(name: str, domain: str) -> None:
    """Networks and settings of ColinQiyangLi/qam (`experiments/reproduce.py`) and ColinQiyangLi/qc."""
    method = METHODS[name]
    config = compose_config(settings(method, DOMAINS[domain], 3, 7, Path("out/cell"), 200_000, Path("data"), "float32"))
    algorithm, critic = config.algorithm, config.algorithm["critic"]
    assert (config.task.name, config.seed) == (f"ogbench/{domain}-singletask-task3-v0", 7)
    assert config.task.reward == ("shaped" if domain == "cube-double" else "sparse")
    assert (config.chunk.horizon, config.chunk.action_horizon, config.policy["steps"]) == (5, 5, 10)
    assert config.policy["hidden"] == critic["hidden"] == [512] * 4
    assert (config.policy["activation"], config.policy["normalization"]) == ("gelu", "identity")
    assert (algorithm["batch_size"], algorithm["gamma"], algorithm["tau"], algorithm["lr"]) == (256, 0.99, 0.005, 3e-4)
    ours = name.startswith("qc")
    assert (critic["members"], algorithm["rho"] or 0) == ((2, 0) if ours else (10, 0.5))
    if method.preset == "fql":
        assert (algorithm["alpha"], algorithm["normalize_q"]) == (300.0, False)
    if name == "ifql":
        assert algorithm["implicit"]["expectile"] == (0.95 if domain == "puzzle-3x3" else 0.9)
    if method.preset == "ifql":
        assert (algorithm["candidates"], algorithm["reduction"], algorithm["ema_decay"]) == (32, "min", 0.0)
    if name == "dsrl":
        assert algorithm["noise_space"]["bound"] == (0.4 if domain == "scene" else 1.0)
        assert (algorithm["target_entropy"], algorithm["distill"], algorithm["train_base"]) == (-12.5, 1.0, True)
    assert config.budget.updates == config.replay.offline_updates == 200_000


def test_every_method_has_published_curves() -> None:
    for method in METHODS.values():
        for domain in DOMAINS:
            for task in TASKS:
                for updates in BUDGETS:
                    found = published(method, domain, task, updates)
                    assert found is not None and 0 <= found[1] <= found[0] + 1e-9 <= found[2] + 2e-9 <= 100.1


def test_table_compares_the_tasks_that_have_runs() -> None:
    def cell(task: int, seed: int, success: dict[str, float], updates: int = 100_000) -> dict[str, Any]:
        return {"method": "qc_ifql", "domain": "puzzle-3x3", "task": task, "seed": seed, "updates": updates} | {
            "success": success
        }

    cells = [
        cell(1, 0, {"50000": 0.2, "100000": 1.0}),
        cell(2, 0, {"100000": 0.8}),
        cell(1, 1, {"100000": 0.9}),
        cell(2, 1, {"100000": 0.7, "200000": 1.0}, 200_000),
    ]
    entry = figures(cells)["qc_ifql"]["puzzle-3x3"]["100000"]
    assert (entry["tasks"], entry["seeds"]) == ([1, 2], [0, 1])
    assert entry["mean"]["estimate"] == pytest.approx((90 + 80) / 2)
    assert entry["published"]["value"] == pytest.approx(100, abs=0.5)  # both tasks
    assert entry["met"] is False  # 85 is more than 10 points below the interval
    table = rows(figures(cells))
    assert [row["updates"] for row in table] == [100_000, 200_000]
    assert table[0]["by task, ours / published"] == "95 / 100; 75 / 100"
    assert table[1]["success [95 %]"] == "100"  # one seed has no interval
