"""Tests of the study of goals in hindsight: its cells, its settings and its score."""

from pathlib import Path

import pytest

from benchmarks.her.study import HER, METHODS, STUDY, TASKS
from benchmarks.study import learning_curve
from robopolicy.training.compose import compose_config


def test_cells_are_three_seeds_per_row_and_only_reach_has_a_baseline() -> None:
    names = [STUDY.cell_name(key) for key in STUDY.cell_keys()]
    assert len(names) == 3 * (5 + 1) and names[0] == "her/sac-reach-0"
    assert [name for name in names if "push" in name] == [f"her/td3_her-push-{seed}" for seed in range(3)]
    assert STUDY.contrasts("sac_her", "reach") and not STUDY.contrasts("td3_her", "push")
    assert not STUDY.contrasts("sac", "reach")


def test_the_settings_of_every_task_and_learner_compose() -> None:
    for preset, method in ((task.preset, method) for task in TASKS.values() for method in task.methods):
        config = compose_config([f"experiment={preset}", *METHODS[method][1]])
        assert config.replay.hindsight.strategy == "future" and config.evaluation.success_step == "last"


@pytest.mark.slow
def test_a_cell_trains_and_records_success_and_curve(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium_robotics", reason="needs robopolicy[gymnasiumrobotics]")
    study = HER(1200)
    cell = study.run(("sac_her", "reach", 0), tmp_path)
    assert len(cell["success"]) == 100 and cell["env_steps"] == 1200
    assert study.is_current(cell) and not STUDY.is_current(cell)
    assert study.scores(cell)[0].curve == learning_curve(tmp_path / "run", "success")
    assert study.describe(cell).startswith("success ")
