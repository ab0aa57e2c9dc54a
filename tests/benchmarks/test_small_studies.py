"""Tests of the studies of few steps, offline learning, images, mjlab, parts of text methods and first steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.few_step import training
from benchmarks.few_step.learners import LEARNERS, Settings
from benchmarks.few_step.study import FewStep
from benchmarks.offline import data
from benchmarks.offline.study import METHODS, Offline
from benchmarks.parts.recipes import PARTS, recipe
from benchmarks.parts.study import TextParts
from benchmarks.studies import load_study
from benchmarks.study import finished, jobs, run_jobs
from benchmarks.study_table import tabulate
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.compose import compose_config

SMALL = ("few_step", "offline", "pixels", "mjlab_finetune", "parts", "first_step")


@pytest.mark.parametrize("name", SMALL)
def test_a_plan_has_five_seeds_per_row_and_a_baseline_that_is_a_row(name: str) -> None:
    study = load_study(name)
    keys = study.cell_keys()
    seeds = [{key[-1] for key in keys if key[:-1] == row} for row in {key[:-1] for key in keys}]
    assert len(set(keys)) == len(keys) and {len(each) for each in seeds} <= {5, 10}  # ten of a baseline: the null arm
    baselines = {each.baseline for method in study.methods for each in study.contrasts(method, study.tasks[0])}
    assert baselines and baselines <= set(study.methods)


@pytest.mark.parametrize("name", SMALL)
def test_committed_cells_are_read(name: str) -> None:
    study = load_study(name)
    table = tabulate(study, finished(study))
    assert {entry.method for entry in table.entries} <= set(study.methods)


def test_seeds_are_planned_for_rows_whose_names_are_not_in_the_keys() -> None:
    assert (FewStep().planned("flow-10", "lift"), FewStep().planned("meanflow-2", "lift")) == (10, 5)
    assert load_study("takeover").planned("dagger", "lift") == 10
    composition = load_study("composition")
    assert [composition.planned(m, "lift") for m in ("better parent", "convex")] == [10, 5]
    assert load_study("parts").planned("(imitation)", "lift") == 10
    assert load_study("text").planned("(imitation)", "arithmetic") == 20


def test_learners_that_extend_another_one_are_compared_with_it() -> None:
    against = {method: [each.baseline for each in Offline().contrasts(method, "point_mass")] for method in METHODS}
    assert (against["prdc"], against["a2pr"], against["odice"], against["bc"]) == (["td3_bc"], ["td3_bc"], ["iql"], [])


def test_rows_of_a_head_with_several_samplers_have_an_outcome_per_seed() -> None:
    study = FewStep()
    cells: list[dict[str, Any]] = []
    for seed, success in ((0, 0.5), (1, 0.9), (2, 1.0)):
        result = {"network_calls": 4, "success": success, "n": 200, "ms_per_action": 0.1 * (seed + 1)}
        cells.append(
            {"learner": "flow", "task": "lift", "seed": seed, "train_seconds": 10.0, "samplers": {"4": result}}
        )
    (row,) = tabulate(study, cells).rows()
    assert (row["method"], row["seeds"], row["calls per chunk"], row["ms per action"]) == (
        "flow-4",
        "3 of 10",
        4,
        "0.200",
    )
    assert str(row["score [95 %]"]).startswith("80.0%")


def test_a_sampler_changes_the_calls_and_not_the_weights() -> None:
    raw = {"normalization": "identity", "action_normalization": "identity"}
    policy = FlowPolicy(FlowConfig(hidden=(8,), **raw), PolicySpec({"state": (2,)}, 1))  # type: ignore[arg-type]
    other = training.with_sampler(policy, {"steps": 10})
    assert (policy.nfe, other.nfe) == (4, 10)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in policy.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flow", "reflow", "distilled"])
def test_a_head_is_trained_and_evaluated_with_all_samplers(name: str, tmp_path: Path) -> None:
    study = FewStep(Settings(demonstrations=2, updates=2, batch_size=8, episodes=2), (0,), ())
    found = study.run((name, "lift", 0), tmp_path)
    assert list(found["samplers"]) == list(LEARNERS[name].samplers) and study.is_current(found)
    assert all(result["n"] == 2 and result["latency_ms"] > 0 for result in found["samplers"].values())


def test_the_opposite_behaviour_steers_away_from_the_goal() -> None:
    sim = make_sim(data.TASK, SimOptions(num_envs=4))
    obs = sim.reset(0)
    found = data.opposite(sim, obs)
    mirrored = {"state": torch.cat([obs["state"][:, :4], -obs["state"][:, 4:]], dim=1)}
    expert: Tensor = data.BEHAVIOURS[0].make()(sim, mirrored)
    sim.close()
    assert torch.equal(found, expert) and not torch.equal(found, data.BEHAVIOURS[0].make()(sim, obs))


@pytest.mark.parametrize("method", list(METHODS))
def test_the_settings_of_an_offline_learner_compose(method: str) -> None:
    settings = [setting.format(updates=10) for setting in METHODS[method].settings]
    config = compose_config([f"task={data.TASK}", f"algorithm={method}", "policy=squashed_gaussian", *settings])
    assert config.algorithm is not None


@pytest.mark.parametrize("part", list(PARTS))
def test_a_recipe_differs_from_grpo_by_its_part_alone(part: str) -> None:
    plain, found = recipe("plain"), recipe(part)
    changed = {section for section in found if found[section] != plain.get(section)}
    expected = {*PARTS[part].taken, *(("estimator",) if PARTS[part].estimator else ())}
    assert changed == expected


def test_the_first_part_also_shows_the_cloned_policies() -> None:
    study, cell = TextParts(), {"part": "plain", "seed": 2, "base": [0, 1], "after": [1, 1]}
    assert [score.method for score in study.scores(cell)] == ["(imitation)", "plain"]
    assert len(study.scores({**cell, "part": "hierarchical"})) == 1


@pytest.mark.slow
def test_a_small_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study = Offline(20, ("iql-point_mass-1",))
    assert run_jobs(jobs(study, tmp_path / "cells"), parallel=1, work=tmp_path / "work").exit_code == 0
    assert tabulate(study, finished(study, tmp_path / "cells")).entries
