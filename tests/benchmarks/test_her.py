"""Tests of the study of goals in hindsight: its cells, its settings and its score."""

from pathlib import Path

import pytest

from benchmarks.her.study import HER, METHODS, STUDY, TASKS
from benchmarks.study import learning_curve, run_cell
from robopolicy.training.compose import compose_config


def test_cells_are_five_seeds_per_row_and_both_tasks_have_baselines() -> None:
    names = [STUDY.cell_name(key) for key in STUDY.cell_keys()]
    assert len(names) == 5 * (6 + 3) and names[0] == "her/sac-reach-0"
    assert {name.split("-")[0] for name in names if "push" in name} == {"her/sac", "her/td3", "her/td3_her"}
    baselines = {(m, t): [c.baseline for c in STUDY.contrasts(m, t)] for m in METHODS for t in TASKS}
    assert baselines["td3_her", "push"] == baselines["td3_her", "reach"] == ["td3"]
    assert baselines["sac_her_final", "reach"] == ["sac"] and not baselines["td3", "push"]


def test_the_settings_of_every_task_and_learner_compose() -> None:
    for name, method in ((name, method) for name, task in TASKS.items() for method in task.methods):
        config = compose_config(STUDY.trainings((method, name, 0))["run"])
        assert config.replay.hindsight.strategy == METHODS[method][0] and config.evaluation.success_step == "last"


@pytest.mark.slow
def test_a_cell_trains_and_records_success_and_curve(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium_robotics", reason="needs robopolicy[gymnasiumrobotics]")
    study = HER(1200)
    cell = run_cell(study, ("sac_her", "reach", 0), tmp_path)
    assert len(cell["success"]) == 100 and cell["env_steps"] == 1200
    assert study.is_current(cell) and not STUDY.is_current(cell)
    assert study.scores(cell)[0].curve == learning_curve(tmp_path / "run", "success")
    assert study.describe(cell).startswith("success ")
