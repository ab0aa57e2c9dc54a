"""Runs that are killed or interrupted and then resumed, and a bitwise comparison of their results."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from robopolicy.cli.main import main
from robopolicy.training.loggers import JsonlLogger


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights, optimisers, replay, simulator and random states at the end of a run."""
    last = run / "checkpoints" / "last"
    state = load_file(last / "training_state" / "tensors.safetensors")
    return load_file(last / "model.safetensors") | {f"state.{key}": value for key, value in state.items()}


def assert_identical(one: Path, two: Path) -> None:
    """Two runs end bitwise equal; unfinished returns in the replay are NaN."""
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    different = [key for key in first if not torch.equal(first[key].nan_to_num(), second[key].nan_to_num())]
    assert different == []


def kill_and_resume(settings: list[str], out: Path) -> Path:
    """Train in another process, kill it with SIGKILL after its first resume point, and resume here."""
    run = out / "killed"
    command = [sys.executable, "-m", "robopolicy", "train", *settings, f"out={out}", "name=killed"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    manifest, deadline = run / "checkpoints" / "last" / "manifest.json", time.monotonic() + 60
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.kill()
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors
    assert not (run / "report.json").exists()
    assert main(["train", "--resume", str(run)]) == 0
    return run


def interrupted_at(update: int, settings: list[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that is interrupted after `update` and resumed."""
    log = JsonlLogger.log

    def interrupt(self: JsonlLogger, at: int, row: dict[str, float]) -> None:
        if at == update and "train/env_steps" in row:
            os.kill(os.getpid(), signal.SIGINT)
        log(self, at, row)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlLogger, "log", interrupt)
        assert main(["train", *settings, f"out={out}", "name=stopped"]) == 130
    assert main(["train", "--resume", str(out / "stopped")]) == 0
    return out / "stopped"
