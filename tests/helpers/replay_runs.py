"""Small runs of off-policy learners on the point mass."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import assert_identical

from robopolicy.algorithms.sac import SAC
from robopolicy.cli.main import main
from robopolicy.data.batches import Transitions
from robopolicy.training.compose import compose_config
from robopolicy.training.loggers import JsonlLogger
from robopolicy.training.loop import Trainer
from robopolicy.training.runs import start_run

SMALL = ["policy=squashed_gaussian", "policy.hidden=[16]", "algorithm.critic.hidden=[16]", "algorithm.batch_size=16"]
FAST = ["evaluation.episodes=0", "logging.every=1", "sim.num_envs=4"]
QUICK = [*FAST, "replay.learning_starts=100"]
CHUNKS = ["chunk.horizon=4", "chunk.action_horizon=2"]
COMMON = ["task=point_mass", "task.reward=shaped", *SMALL, *QUICK, *CHUNKS]


def trainer(out: Path, *settings: str) -> Trainer:
    """A run before its first update."""
    return start_run(compose_config([*settings, f"out={out}", "name=run"]))


def spy(monkeypatch: pytest.MonkeyPatch) -> list[Transitions]:
    """Record the batches of updates of SAC and its subclasses."""
    batches: list[Transitions] = []
    update = SAC.update

    def recording(self: SAC, batch: Transitions) -> Any:
        batches.append(batch)
        return update(self, batch)

    monkeypatch.setattr(SAC, "update", recording)
    return batches


def assert_interruption_changes_nothing(
    settings: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, updates: int = 8
) -> None:
    """A run of `updates` updates and a run interrupted three updates before the end are bitwise equal."""
    small = ["replay.capacity=300"] if any(text.startswith("replay.") for text in settings) else []
    settings = [*settings, *small, f"budget.updates={updates}", "checkpoint_every=3", f"out={out}"]
    assert main(["train", *settings, "name=whole"]) == 0
    log = JsonlLogger.log

    def interrupt(self: JsonlLogger, update: int, row: Any) -> None:
        if update == updates - 3:
            os.kill(os.getpid(), signal.SIGINT)
        log(self, update, row)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlLogger, "log", interrupt)
        assert main(["train", *settings, "name=stopped"]) == 130
    torch.manual_seed(123)  # a new process has an arbitrary random state
    assert main(["train", "--resume", str(out / "stopped")]) == 0
    assert_identical(out / "whole", out / "stopped")


def assert_refused(settings: list[str], message: str, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`robopolicy train` refuses the settings with a one-line message and writes no files."""
    assert main(["train", *settings, f"out={out}/runs"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (out / "runs").exists()
