"""Tests of the world-model benchmark table, computed from cells with a known ranking."""

import numpy as np

from benchmarks.worldmodel.table import figures, rows
from benchmarks.worldmodel.tasks import ABLATIONS, SMALL, TASKS
from robopolicy.evaluation.result import Cost, EvalResult


def cell(index: int, seconds: float = 4.0) -> dict:
    """A policy that succeeds on the first `index` of 8 starts, and on one fewer in the model."""

    def side(count: int) -> dict:
        success = np.arange(8) < count
        cost = Cost(1, 8, 80, 8, seconds)
        return EvalResult("toy/push", np.arange(8), success.astype(np.float64), np.full(8, 10), success, cost).to_dict()

    psnr = {"true": {"1": 30.0}, "shuffled": {"1": 26.5}}
    gate = {"passed": True, "psnr": psnr, "directions": {}}
    sides = {"real": side(index), "predicted": side(max(0, index - 1))}
    return {"task": "push", "player": f"p{index}", "seed": 0, **sides, "fqe": float(-index), "gate": gate}


def test_every_task_ranks_at_least_12_policies_outside_its_training_data():
    for task in TASKS.values():
        assert len(set(task.players)) >= 12 and not set(task.players) & set(task.behaviours)
    assert len(SMALL.players) == 6


def test_the_table_shows_both_estimators():
    cells = [cell(index) for index in range(1, 9)]
    model, fqe = rows(cells)
    assert model["estimator"] == "world model" and model["policies"] == 8 and model["gap"] == "3.5 dB"
    assert str(model["pearson"]).startswith("1") and model["s/episode"] == "0.5 / 0.5"
    assert fqe["pearson"] == "-1.00" and fqe["bias"] == "-"
    found = figures(cells)["tasks"]["push"]["0"]
    assert found["metrics"]["bias"]["estimate"] == -0.125 and found["fqe"]["spearman"] == -1.0
    assert found["horizons"]["5"] == {"pearson": None, "bias": 0.0}  # all episodes last ten steps
    assert found["horizons"]["10"] == {"pearson": 1.0, "bias": -0.125}


def test_ablations_change_only_training_data_or_settings():
    for name, task in ABLATIONS.items():
        base = TASKS[task.base]
        assert task.players == base.players and task.cloned == base.cloned and name not in TASKS
        differing = {key for key, value in vars(task).items() if value != vars(base)[key]}
        assert differing - {"name", "base"} in ({"films"}, {"behaviours"}, {"settings"})
