"""Tests of the world-model benchmark: its policies, and its tables from cells with a known ranking."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.study_table import tabulate
from benchmarks.worldmodel.policies import Clone, Composed, FineTuned, PolicyStore
from benchmarks.worldmodel.study import STUDY
from benchmarks.worldmodel.table import METRICS, policy_rows
from benchmarks.worldmodel.tasks import ABLATIONS, EVERY_TASK, SMALL, TASKS
from robopolicy.evaluation.result import Cost, EvalResult


def cell(index: int, seed: int = 0, lost: int = 1) -> dict:
    """A policy that succeeds on the first `index` of 8 starts, and on `lost` fewer in the model."""

    def side(count: int) -> dict:
        success = np.arange(8) < count
        cost = Cost(1, 8, 80, 8, 4.0)
        return EvalResult("toy/push", np.arange(8), success.astype(np.float64), np.full(8, 10), success, cost).to_dict()

    psnr = {"true": {"1": 30.0}, "shuffled": {"1": 26.5}}
    replays = {"recorded": index / 8, "detected": index / 8, "replayed": 0.5}
    sides = {"real": side(index), "predicted": side(max(0, index - lost)), "replays": replays}
    return {"task": "push", "policy": f"p{index}", "seed": seed, **sides, "gate": {"psnr": psnr}}


def test_every_task_ranks_at_least_12_policies_of_all_kinds_outside_its_training_data():
    for task in TASKS.values():
        assert len(task.policies) >= 12 and not set(task.policies) & set(task.behaviours)
        clones = [recipe for recipe in task.policies.values() if isinstance(recipe, Clone)]
        heads = {"flow", "diffusion", "gaussian", "meanflow", "autoregressive"}
        assert {recipe.head for recipe in clones} == heads and len({r.demonstrations for r in clones}) >= 3
        tuned = [recipe for recipe in task.policies.values() if isinstance(recipe, FineTuned)]
        assert {recipe.experiment for recipe in tuned} == {"fine_tune", "offline_to_online"}
        assert any(isinstance(recipe, Composed) for recipe in task.policies.values())
    assert set(SMALL.policies) <= set(TASKS["push"].policies)


def test_metrics_of_one_seed_match_hand_computed_values():
    real, predicted = np.array([0.2, 0.5, 1.0]), np.array([0.1, 0.6, 0.7])
    found = {name: metric(real, predicted) for name, metric in METRICS.items()}
    assert found["bias"] == pytest.approx(-0.1) and found["best policy"] == pytest.approx(-0.3)
    assert found["spearman"] == pytest.approx(1) and found["pairs"] == 1 and found["regret"] == 0


def test_intervals_of_the_table_count_seeds_with_all_policies(monkeypatch: pytest.MonkeyPatch):
    policies = {f"p{index}": Composed(()) for index in range(1, 9)}
    monkeypatch.setitem(EVERY_TASK, "push", replace(TASKS["push"], policies=policies))
    unfinished = [cell(index, 3) for index in range(1, 5)]
    cells = [cell(index, seed, lost) for seed, lost in ((0, 1), (1, 1), (2, 0)) for index in range(1, 9)]
    (row,) = tabulate(STUDY, cells + unfinished).rows()
    assert (row["seeds"], row["policies"], row["gap"], row["s/episode, real / model"]) == (
        "3",
        8,
        "3.5 dB",
        "0.5 / 0.5",
    )
    assert str(row["score [95 %]"]).startswith("1") and str(row["bias"]).startswith("-0.0833")


def test_the_table_of_policies_separates_detection_from_prediction():
    row = policy_rows([cell(6, 0), cell(6, 1, lost=3)])[0]
    assert (row["policy"], row["seeds"], row["real"], row["predicted"]) == ("p6", 2, "75%", "50%")
    assert (row["recorded"], row["detected"], row["replayed"]) == ("75%", "75%", "50%")


CHANGED = ("films", "behaviours", "after_success", "settings", "calibrated")


def test_ablations_change_only_the_world_model():
    for name, task in ABLATIONS.items():
        base = TASKS[task.base]
        assert task.policies == base.policies and name not in TASKS
        differing = {key for key, value in vars(task).items() if value != vars(base)[key]}
        assert len(differing - {"name", "base"}) == 1 and differing < {"name", "base", *CHANGED}


def test_cells_of_other_recordings_or_settings_run_again():
    current = {"task": "lift", **TASKS["lift"].facts()}
    assert STUDY.is_current(current) and not STUDY.is_current({**current, "task": "unknown"})
    for ablation in ("lift-few", "lift-no-replays", "lift-one-step"):
        assert not STUDY.is_current({**current, **ABLATIONS[ablation].facts(), "task": "lift"})


def test_a_policy_of_pixels_is_made(tmp_path: Path):
    recipe = TASKS["push"].policies["gaussian-pixels-200"]
    assert isinstance(recipe, Clone)
    recipes = {"pixels": replace(recipe, demonstrations=1, updates=1)}
    policy = PolicyStore(tmp_path, "toy/push", "top", 64, recipes, 0).policy("pixels")
    assert set(policy.spec.observation) == {"image.top", "gripper"}
