"""Tests of benchmark output: the final JSON line and the written result files."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import common, sim_throughput

ROWS = [{"simulator": "a", "rate": 12345.6}, {"simulator": "b", "rate": 0.5}]


def test_last_line_is_one_json_object_with_versions(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_result("demo", ROWS, {"vs_b": np.float64(2.0), "low": float("nan"), "seeds": np.arange(2)})
    line = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert line["benchmark"] == "demo"
    assert (line["vs_b"], line["low"], line["seeds"]) == (2.0, None, [0, 1])
    assert line["versions"]["mujoco"]
    assert line["machine"]["cores"] >= 1


def test_results_and_cells_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    common.write_result("demo", ROWS, {"vs_b": 2.0}, command="python -m benchmarks.demo")
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["rows"] == ROWS
    assert "| a | 12,346 |" in (tmp_path / "demo.md").read_text()
    assert common.load_cell("demo/ppo-hopper-0") is None
    common.save_cell("demo/ppo-hopper-0", {"return": np.float32(1.5)})
    assert common.load_cell("demo/ppo-hopper-0") == {"return": 1.5}
    assert not list(tmp_path.rglob("*.part"))


def test_results_state_where_their_cells_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    old, new = {"return": 1.0}, {"return": 2.0, "made_on": {"cpu": "Intel", "torch": "2.0"}}
    common.write_result("demo", ROWS, {}, command="python -m benchmarks.demo", cells=[new, old, old])
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["made_on"] == [{"cells": 2}, {"cells": 1, "cpu": "Intel", "torch": "2.0"}]
    assert "machine" not in record and "versions" not in record
    text = "Cells by processor and versions: 2 not recorded; 1 on Intel with torch 2.0."
    assert f"`python -m benchmarks.demo`. {text}" in (tmp_path / "demo.md").read_text()


def test_simulator_throughput_measures_every_simulator() -> None:
    pytest.importorskip("envpool")
    rows, figures = sim_throughput.summarise(sim_throughput.measure(num_envs=2, turns=1, seconds=0.01))
    assert {row["simulator"] for row in rows} >= {"EnvPool", "SyncVectorEnv", "AsyncVectorEnv"}
    assert all(float(figures[name]) > 0 for name in ("vs_sync", "vs_async", "vs_envpool"))  # type: ignore[arg-type]
