"""Runs whose checkpoints hold another policy than they train: how they resume, and what begins at their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_replay_runs import QUICK, assert_interruption_changes_nothing

from robopolicy.cli.main import main
from robopolicy.policies.wrappers.best_of_n import SelectedPolicy
from robopolicy.training.checkpoint import load_policy

RUN = ["task=point_mass", *QUICK, "algorithm.batch_size=16", "algorithm.critic.hidden=[16]"]
PLAYERS = {
    "qc": ["algorithm.candidates=3"],
    "dqc": ["algorithm.candidates=3", "algorithm.n_step=8"],
    "expo": ["algorithm.candidates=2", "algorithm.edits=1"],
    "pa_rl": ["algorithm.candidates=3", "algorithm.top=2", "algorithm.ascent_steps=1"],
    "idql": ["algorithm.candidates=3"],
}


@pytest.fixture(scope="module")
def base(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flow of three steps."""
    out = tmp_path_factory.mktemp("base")
    settings = ["task=point_mass", "algorithm=bc", "policy.hidden=[16]", "policy.steps=3", "budget.updates=5"]
    settings += [f"dataset={demonstrations}", "evaluation.episodes=0", f"out={out}", "name=base"]
    assert main(["train", *settings]) == 0
    return out / "base/checkpoints/last"


def test_a_resumed_teacher_keeps_the_steps_that_its_student_has_not(
    base: Path, demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*RUN, "algorithm=fql", f"init_from={base}", f"dataset={demonstrations}"]
    assert_interruption_changes_nothing(settings, tmp_path, monkeypatch)
    student, _ = load_policy(tmp_path / "whole/checkpoints/last")
    assert student.network_calls == 1  # type: ignore[attr-defined]


def test_a_student_is_no_teacher(
    base: Path, demonstrations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*RUN, "algorithm=fql", f"dataset={demonstrations}", "budget.updates=1", f"out={tmp_path}"]
    assert main(["train", *settings, f"init_from={base}", "name=first"]) == 0
    assert main(["train", *settings, f"init_from={tmp_path}/first/checkpoints/last", "name=second"]) == 2
    assert "flow of several steps" in capsys.readouterr().err


@pytest.mark.parametrize("name", PLAYERS)
def test_a_run_that_begins_with_a_player_trains_the_policy_inside(
    name: str, base: Path, demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*RUN, f"algorithm={name}", *PLAYERS[name], f"dataset={demonstrations}"]
    first = [f"init_from={base}", "budget.updates=1", f"out={tmp_path}", "name=first"]
    assert main(["train", *settings, *first]) == 0
    settings += [f"init_from={tmp_path}/first/checkpoints/last"]
    assert_interruption_changes_nothing(settings, tmp_path, monkeypatch)
    player, _ = load_policy(tmp_path / "whole/checkpoints/last")
    assert isinstance(player, SelectedPolicy) and not isinstance(player.base, SelectedPolicy)
