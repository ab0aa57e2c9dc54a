"""Tests of experiment trackers against the packages themselves, without a network."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from robopolicy.errors import UserError
from robopolicy.training import trackers
from robopolicy.training.config import LoggingConfig, TrainConfig
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.trackers import SafeLogger, TensorBoardLogger, TrackioLogger, WandbLogger, make_trackers

ROWS = [(1, {"actor/loss": 0.5}), (2, {"actor/loss": 0.25, "rollout/success": 1.0})]


@pytest.mark.parametrize(
    "make, extra",
    [
        (lambda path: TensorBoardLogger(path), "tensorboard"),
        (lambda path: WandbLogger(path, project="p", name="n", identifier="i", config={}), "wandb"),
        (lambda path: TrackioLogger(project="p", name="n", config={}), "trackio"),
    ],
)
def test_missing_packages_name_their_extra(tmp_path, monkeypatch, make, extra):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(UserError, match=rf"pip install 'robopolicy\[{extra}\]'"):
        SafeLogger("tracker", lambda: make(tmp_path))


def test_tensorboard_events_are_written(tmp_path):
    pytest.importorskip("tensorboard")
    logger = TensorBoardLogger(tmp_path)
    logger.log(1, {"loss": 0.5})
    logger.close()
    assert [file for file in tmp_path.iterdir() if file.name.startswith("events") and file.stat().st_size]


def wandb_records(file):
    """Yield the records of a file of W&B, which is a log of LevelDB after 7 bytes; none if it is not written yet."""
    from wandb.proto import wandb_internal_pb2 as messages

    data, place, record = file.read_bytes(), 7, b""
    assert data[:4] in (b":W&B", b"")
    while place + 7 < len(data):
        if (left := 32768 - place % 32768) < 7:  # blocks end with padding
            place += left
            continue
        _, size, part = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if part in (1, 4):  # the whole record, or its last part
            message = messages.Record()
            message.ParseFromString(record)
            yield message
            record = b""


def test_an_offline_run_of_wandb_holds_all_rows_and_the_config(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    logger = WandbLogger(tmp_path, project="p", name="n", identifier="i", config={"seed": 7})
    try:
        for update, row in ROWS:
            logger.log(update, row)
    finally:
        logger.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-i.wandb")
    deadline = time.monotonic() + 60
    # The helper process of W&B still writes.
    while not (records := list(wandb_records(file))) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    history = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [(row["_step"], {key: row[key] for key in row if "/" in key}) for row in history] == ROWS
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.run_id, run.display_name) == ("p", "i", "n")
    assert {item.key: item.value_json for item in run.config.update}["seed"] == "7"


def test_wandb_obeys_the_mode_of_the_environment(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logger = WandbLogger(tmp_path, project="p", name="n", identifier="i", config={})
    logger.log(*ROWS[0])
    logger.close()
    assert not list(tmp_path.glob("wandb/*run*"))


TRACKIO_RUN = """
from robopolicy.training.trackers import TrackioLogger

for start, stop in (0, 2), (2, 3):
    logger = TrackioLogger(project="p", name="n", config={"seed": 7}, resume_at=start)
    for update in range(start + 1, stop + 1):
        logger.log(update, {"actor/loss": 1 / update})
    logger.close()
"""


def test_trackio_keeps_one_run_across_a_resume(tmp_path):
    """In a process of its own, since Trackio reads TRACKIO_DIR on import."""
    pytest.importorskip("trackio")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRACKIO")}
    environment |= {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", TRACKIO_RUN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    (file,) = tmp_path.glob("*.db")
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    assert [(name, step, json.loads(text)) for _, name, step, text in rows] == [
        ("n", update, {"actor/loss": 1 / update}) for update in (1, 2, 3)
    ]
    assert len({run for run, *_ in rows}) == 1


def test_runs_of_one_name_are_different_runs_of_a_tracker(tmp_path, monkeypatch):
    """The runs of `bench` are called seed0, seed1, ... in every study."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(trackers, "WandbLogger", lambda _, name, identifier, **__: found.append((name, identifier)))
    monkeypatch.setattr(trackers, "TrackioLogger", lambda name, **_: found.append((name, name)))
    chosen = replace(LoggingConfig(), wandb=True, trackio=True)
    for folder, resume_at in ((tmp_path / "ppo", 0), (tmp_path / "sac", 0), (tmp_path / "ppo", 5)):
        folder.mkdir(exist_ok=True)
        make_trackers(replace(TrainConfig(), name="seed0", logging=chosen), folder, resume_at)
    assert found[:2] == found[4:] and not {run for _, run in found[:2]} & {run for _, run in found[2:4]}
    assert found[0][0] == "seed0" and found[1][1].startswith("seed0-")


class Raising:
    """A logger that raises in every call."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def log(self, update, row):
        self.calls.append("log")
        raise ConnectionError("no route to host")

    def close(self):
        self.calls.append("close")
        raise ConnectionError("no route to host")


def test_a_tracker_that_raises_is_dropped_with_one_warning(caplog):
    calls: list[str] = []
    logger = SafeLogger("Trackio", lambda: Raising(calls))
    for update, row in ROWS:
        logger.log(update, row)
    logger.close()
    assert calls == ["log"]
    assert caplog.messages == ["Trackio failed and gets no further rows; the run continues: no route to host"]


def test_training_goes_on_without_a_tracker_that_raises(tmp_path, monkeypatch, caplog):
    from robopolicy.cli.main import main

    monkeypatch.setattr("robopolicy.training.trackers.TrackioLogger", lambda **_: Raising([]))
    settings = ["task=point_mass", "algorithm=ppo", "policy=gaussian", "budget.updates=2", "logging.every=1"]
    small = ["sim.num_envs=2", "algorithm.num_steps=8", "evaluation.episodes=0", "logging.trackio=true"]
    assert main(["train", *settings, *small, f"out={tmp_path}", "name=run"]) == 0
    assert [row["update"] for row in read_jsonl(Path(tmp_path) / "run" / "metrics.jsonl")] == [1, 2]
    assert len(caplog.messages) == 1
