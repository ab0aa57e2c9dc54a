"""Tests of AILBoost runs: demonstrations without rewards, and bit-identical resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from replay_runs import COMMON, assert_interruption_changes_nothing, assert_refused, spy, trainer

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.training import build
from robopolicy.training.loggers import read_jsonl

AILBOOST_RUN = [*COMMON, "algorithm=ailboost", "algorithm.learner_decisions=2", "algorithm.discriminator_delay=2"]
RLPD_RUN = [*COMMON, "algorithm=rlpd", "algorithm.utd=2", "algorithm.policy_delay=2"]


def test_ailboost_trains_on_demonstrations_without_rewards(
    tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = build.read_dataset

    def without_rewards(path: str, **options: str) -> Episodes:
        episodes = read(path, **options)
        return replace(episodes, arrays={key: value for key, value in episodes.arrays.items() if key != "reward"})

    monkeypatch.setattr(build, "read_dataset", without_rewards)
    batches = spy(monkeypatch)
    data = f"dataset={demonstrations}"
    assert main(["train", *AILBOOST_RUN, data, "budget.updates=3", f"out={tmp_path}"]) == 0
    assert all(not bool(batch.reward[~batch.online].any()) and 0 < batch.online.float().mean() < 1 for batch in batches)
    rows = read_jsonl(tmp_path / "point_mass_gaussian_ailboost_seed0" / "metrics.jsonl")
    assert {"critic/divergence", "critic/learner"} <= {key for row in rows for key in row}
    with pytest.raises(UserError, match="has no 'reward'"):
        trainer(tmp_path, *RLPD_RUN, data, "budget.updates=3")


def test_an_interrupted_run_resumes_bit_identically(
    tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_interruption_changes_nothing([*AILBOOST_RUN, f"dataset={demonstrations}"], tmp_path, monkeypatch)


def test_a_run_without_demonstrations_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "also needs demonstrations; pass dataset=FOLDER"
    assert_refused([*AILBOOST_RUN, "budget.updates=1"], message, tmp_path, capsys)
