"""Tests of `make gpu`: records survive failures and interruptions, and every step runs in tiny sizes on the CPU."""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import correctness, speed, training
from benchmarks.gpu.records import Options, Step, load_record, run_step, write_page
from docs.compatibility import workplace


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options("cpu", True, tmp_path / "gpu", tmp_path / "work")


def failing(options: Options) -> Iterator[dict[str, object]]:
    yield {"task": "lift", "env steps/s": 12345.6}
    record = load_record("demo", options)
    assert record is not None and record["rows"] == [{"task": "lift", "env steps/s": 12345.6}]
    assert record["error"] == "unfinished"
    raise ValueError("no memory\nmore")


def test_a_failed_step_keeps_its_rows_and_one_line_of_the_reason(options: Options) -> None:
    run_step("demo", Step("Fast?", failing, 60), options)
    record = load_record("demo", options)
    assert record is not None and record["error"] == "ValueError: no memory" and len(record["rows"]) == 1
    assert record["versions"]["torch"] and record["machine"]["device"] == "cpu"


def test_page_has_a_table_of_all_columns_per_step(options: Options) -> None:
    rows = [{"task": "lift", "ms": 0.5}, {"task": "a|b", "note": "no memory"}]
    steps = {"speed": Step("Fast?", lambda _: iter(rows), 60), "later": Step("Later?", failing, 60)}
    run_step("speed", steps["speed"], options)
    page = write_page(steps, options).read_text()
    assert "## Fast?" in page and "`speed`, tiny sizes: finished after 0 s." in page
    assert "| task | ms | note |\n|---|---|---|\n| lift | 0.5 | - |\n| a/b | - | no memory |\n" in page
    assert page.endswith("## Later?\n\n`later` has not run.\n")


def test_a_second_run_repeats_only_what_failed_or_is_named(
    options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = {"good": Step("Good?", lambda _: iter([{"a": 1}]), 60), "bad": Step("Bad?", failing, 60)}
    ran: list[str] = []

    def run(name: str, options: Options, seconds: float) -> None:
        ran.append(name)
        run_step(name, steps[name], options)

    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "run_in_process", run)
    for words in ([], [], ["--again", "good"], ["--table"]):
        monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--quick", "--out", str(tmp_path), *words])
        gpu.main()
    assert ran == ["good", "bad", "bad", "good", "bad"]


def test_a_step_beyond_its_time_limit_is_ended_and_recorded(options: Options) -> None:
    gpu.run_in_process("replay", options, seconds=0.01)
    record = load_record("replay", options)
    assert record is not None and record["error"] == "stopped after 0 s"
    assert "failed: stopped after 0 s" in write_page(gpu.STEPS, options).read_text()


def test_all_steps_together_take_at_most_40_minutes() -> None:
    assert sum(step.seconds for step in gpu.STEPS.values()) <= 40 * 60


def test_a_machine_without_a_gpu_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as stop:
        gpu.main()
    assert stop.value.code == 2
    assert "no GPU is available" in capsys.readouterr().err.splitlines()[-1]


def test_a_curve_ends_at_its_threshold(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    returns = [(1.0, 10.0), (5.0, 20.0), (30.0, 60.0), (40.0, 81.0), (41.0, 99.0)]
    records = [{"seconds": s, "train/env_steps": 100 * s, "rollout/return": value} for s, value in returns]

    def records_of(*_: Any) -> Iterator[dict[str, Any]]:
        yield from records

    monkeypatch.setattr(training, "training", records_of)
    rows = list(training.curve("go1", [], options, 60, threshold=80))
    assert [(row["seconds"], row["return"], row["note"]) for row in rows] == [
        (1.0, 10.0, "-"),
        (30.0, 60.0, "-"),
        (40.0, 81.0, "reached 80"),
    ]
    assert {row["env steps/s, start included"] for row in rows} == {100.0}
    assert [row["seconds"] for row in training.curve("go1", [], options, 60, threshold=100)] == [1.0, 30.0, 41.0]


def test_a_failed_training_run_reports_its_last_line(options: Options) -> None:
    with pytest.raises(RuntimeError, match=r"robopolicy train a: .*nothing"):
        list(training.training("a", ["task=nothing", "budget.updates=1"], options, 600))


@pytest.mark.parametrize("step", [speed.replay, speed.settings])
def test_quick_steps_measure_every_row(step: Any, options: Options) -> None:
    pytest.importorskip("stable_baselines3")
    rows = list(step(options))
    assert rows and not [row for row in rows if "note" in row]
    assert all(value > 0 for row in rows for value in row.values() if isinstance(value, float))


@pytest.mark.parametrize("name", ["bc", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ppo", "sac", "reinflow"))])
def test_an_update_on_the_device_equals_the_one_on_the_cpu(name: str) -> None:
    simulated = pytest.importorskip("simulated", exc_type=ImportError)
    with workplace([name]) as place:
        row = correctness.update_parity(name, correctness.PAIRS[name], place, simulated.NAME)
    assert row["largest"] < 1e-4  # type: ignore[operator]


def test_parity_sees_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, noise = itertools.count(), correctness.HostNoise

    def other_noise() -> correctness.HostNoise:
        made = noise()
        made._generator.manual_seed(next(seeds))
        return made

    monkeypatch.setattr(correctness, "HostNoise", other_noise)
    with workplace(["bc"]) as place:
        assert correctness.update_parity("bc", "flow", place, "cpu")["largest"] > 1e-2  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.compiles
def test_every_step_runs_on_the_cpu_in_tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mjlab")
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--quick", "--out", str(tmp_path)])
    gpu.main()
    records = {name: json.loads((tmp_path / "gpu" / f"{name}.json").read_text()) for name in gpu.STEPS}
    assert {name: record["error"] for name, record in records.items()} == dict.fromkeys(gpu.STEPS)
    assert all(record["rows"] for record in records.values())
