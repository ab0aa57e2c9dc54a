"""Tests of runs whose checkpoints contain a different policy than they train: resume and initialisation."""

from pathlib import Path

import pytest
from replay_runs import QUICK, assert_interruption_changes_nothing

from robopolicy.cli.main import main
from robopolicy.policies.wrappers.best_of_n import BestOfNPolicy
from robopolicy.training.checkpoint import load_policy

RUN = ["task=point_mass", *QUICK, "algorithm.batch_size=16", "algorithm.critic.hidden=[16]"]
BEST_OF_N = {
    "qc": ["algorithm.candidates=3"],
    "dqc": ["algorithm.candidates=3", "algorithm.n_step=8"],
    "expo": ["algorithm.candidates=2", "algorithm.edits=1"],
    "pa_rl": ["algorithm.candidates=3", "algorithm.top=2", "algorithm.ascent_steps=1"],
    "idql": ["algorithm.candidates=3"],
}


def test_resumed_teacher_keeps_its_steps_and_the_student_has_one(
    clone: Path, demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*RUN, "algorithm=fql", f"init_from={clone}/checkpoints/last", f"dataset={demonstrations}"]
    assert_interruption_changes_nothing(settings, tmp_path, monkeypatch)
    student, _ = load_policy(tmp_path / "whole/checkpoints/last")
    assert student.nfe == 1  # type: ignore[attr-defined]


def test_student_is_refused_as_a_teacher(
    clone: Path, demonstrations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*RUN, "algorithm=fql", f"dataset={demonstrations}", "budget.updates=1", f"out={tmp_path}"]
    assert main(["train", *settings, f"init_from={clone}/checkpoints/last", "name=first"]) == 0
    assert main(["train", *settings, f"init_from={tmp_path}/first/checkpoints/last", "name=second"]) == 2
    assert "flow of several steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("qc", "expo") else pytest.mark.slow) for name in BEST_OF_N]
)
def test_run_from_a_best_of_n_policy_trains_its_base(
    name: str, clone: Path, demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*RUN, f"algorithm={name}", *BEST_OF_N[name], f"dataset={demonstrations}"]
    first = [f"init_from={clone}/checkpoints/last", "budget.updates=1", f"out={tmp_path}", "name=first"]
    assert main(["train", *settings, *first]) == 0
    settings += [f"init_from={tmp_path}/first/checkpoints/last"]
    assert_interruption_changes_nothing(settings, tmp_path, monkeypatch, updates=4)
    loaded, _ = load_policy(tmp_path / "whole/checkpoints/last")
    assert isinstance(loaded, BestOfNPolicy) and not isinstance(loaded.base, BestOfNPolicy)
