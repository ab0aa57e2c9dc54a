"""Tests of studies: jobs and tables of a small study, whose cells are known by hand."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks import common, queue, studies
from benchmarks.study import (
    ALL,
    Contrast,
    Published,
    Score,
    Study,
    current,
    failed,
    finished,
    jobs,
    run_cell,
    selected,
)
from benchmarks.study_settings import recorded
from benchmarks.study_table import DIVERGED, UNFINISHED, tabulate, write_study
from robopolicy.errors import UserError
from robopolicy.evaluation.comparison import seed_interval
from robopolicy.training.guards import TrainingDiverged

RATES = {"base": 0.5, "good": 0.9, "same": 0.5, "bad": 0.1}
EPISODES = 100


@dataclass(frozen=True)
class Bandits(Study):
    """Methods of known success."""

    name = "bandits"
    question = "Which method is best?"
    seeds: tuple[int, ...] = tuple(range(5))

    @property
    def tasks(self):
        return ["easy", "hard"]

    @property
    def methods(self):
        return list(RATES)

    def cell_keys(self):
        return [
            (m, t, s)
            for t in self.tasks
            for m in RATES
            for s in (*self.seeds, *(range(100, 105) if m == "base" else ()))
        ]

    def run(self, key, folder):
        method, task, seed = str(key[0]), key[1], int(key[2])
        wins = round(EPISODES * RATES[method]) + (seed * (3 if method == "good" else 1)) % 5
        return {"method": method, "task": task, "seed": seed, "wins": wins, "seconds": 2.0}

    def scores(self, cell):
        outcomes = [1] * cell["wins"] + [0] * (EPISODES - cell["wins"])
        reason = cell.get("applicable") or ""
        curve = cell.get("curve", ())
        return [Score(cell["method"], cell["task"], cell["seed"], {"success": outcomes}, reason=reason, curve=curve)]

    def contrasts(self, method, task):
        return () if method == "base" else (Contrast("base", "success"),)

    def published(self, method, task):
        return {"good": Published(0.95, "someone2025"), "bad": Published(0.5, "someone2025")}.get(method)

    def describe(self, cell):
        return f"{cell['wins']} wins"

    def quick(self):
        return Bandits((0,))


def cells_of(study, **changes):
    return [study.run(key, Path()) | changes for key in study.cell_keys()]


def rows_of(study, cells):
    return {(row["task"], row["method"]): row for row in tabulate(study, cells).rows()}


def test_a_learning_curve_covers_the_steps_that_all_seeds_cover():
    cells = [
        {"method": "base", "task": "easy", "seed": 0, "wins": 50, "curve": [(100, 0.0), (300, 1.0)]},
        {"method": "base", "task": "easy", "seed": 1, "wins": 50, "curve": [(200, 0.5), (400, 0.5)]},
        {"method": "good", "task": "easy", "seed": 0, "wins": 90, "curve": [(100, 0.0), (200, 1.0)]},
        {"method": "good", "task": "easy", "seed": 1, "wins": 90, "curve": [(300, 0.5), (400, 0.5)]},
    ]
    base, good = (entry.curve() for entry in tabulate(Bandits(), cells).entries)
    assert base[0][:2] == [200, 0.5] and base[-1][:2] == [300, 0.75] and not good
    assert all(0 <= low <= high <= 1 for _, _, low, high in base) and base[-1][3] == 1  # of a rate, cut to its range


def test_verdicts_intervals_and_published_numbers_come_from_the_declaration():
    study = Bandits()
    table = tabulate(study, cells_of(study))
    entries = {(entry.task, entry.method): entry for entry in table.entries}
    verdicts = {method: entries["easy", method].verdict for method in RATES}
    assert verdicts["base"] is None
    assert {m: v.verdict for m, v in verdicts.items() if v} == {
        "good": "ahead",
        "same": "not applicable",
        "bad": "behind",
    }
    assert verdicts["same"] and verdicts["same"].reason == "every outcome equals the baseline's"
    good = entries["hard", "good"]
    assert good.score == seed_interval({s: [1] * n + [0] * (100 - n) for s, n in enumerate((90, 93, 91, 94, 92))})
    assert (
        good.reproduced is True
        and entries["easy", "bad"].reproduced is False
        and entries["easy", "same"].reproduced is None
    )
    four_seeds = tabulate(study, [cell for cell in cells_of(study) if cell["seed"] < 4])
    assert {entry.reproduced for entry in four_seeds.entries} == {None}
    row = rows_of(study, cells_of(study))["easy", "good"]
    assert row["baseline"] == "base" and row["published"] == "95.0%" and "92.0% [" in str(row["score [95 %]"])
    assert json.loads(json.dumps(common.plain(table.figures())))["entries"][0]["by_seed"]["0"] == 0.5


def test_a_mechanism_that_never_acts_has_no_verdict():
    study = Bandits()
    row = rows_of(study, cells_of(study, applicable="the tool was never called"))["easy", "good"]
    assert row["verdict"] == "not applicable: the tool was never called"


def test_a_run_that_ends_with_its_baseline_is_a_result_where_runs_fall_back():
    class FallingBack(Bandits):
        falls_back = True

    rows = rows_of(FallingBack(), cells_of(FallingBack()))
    assert rows["easy", "same"]["verdict"] == "level"


def test_a_published_score_that_every_run_reaches_is_not_reproduced():
    class Vague(Bandits):
        def published(self, method, task):
            return Published(0.2, "someone2025", 0.08, 0.3, margin=0.1) if method == "bad" else None

    assert {entry.reproduced for entry in tabulate(Vague(), cells_of(Vague())).entries} == {None}


def test_rows_say_how_many_planned_seeds_have_no_result():
    study = Bandits()
    cells = [cell for cell in cells_of(study) if (cell["method"], cell["seed"]) != ("good", 4)]
    table, complete = tabulate(study, cells), tabulate(study, cells_of(study))
    seeds = {(row["task"], row["method"]): row["seeds"] for row in table.rows()}
    assert seeds["easy", "good"] == "4 of 5" and seeds["easy", "bad"] == "5"
    assert UNFINISHED in table.protocol() and UNFINISHED not in complete.protocol()


def test_planned_rows_without_a_cell_are_named_and_unknown_rows_are_errors():
    study = Bandits()
    table = tabulate(study, [cell for cell in cells_of(study) if cell["method"] != "bad"])
    assert "No cell has run yet: `bad`." in table.notes()
    assert not any("No cell" in line for line in tabulate(study, cells_of(study)).notes())
    assert (study.planned("base", "easy"), study.planned("good", ALL)) == (10, 5)
    with pytest.raises(ValueError, match=r"no row \('gone', 'easy'\)"):
        study.planned("gone", "easy")

    class Renamed(Bandits):
        def rows(self, key):
            return [(f"{key[0]}-1", key[1])]

    with pytest.raises(ValueError, match="which its cell"):
        Renamed().planned("base", "easy")


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_planned_cell_has_rows_and_every_committed_score_a_planned_row(name):
    study = studies.load_study(name)
    planned = {(m, t): study.planned(m, t) for m in study.methods for t in study.tasks}
    unplanned = set(study.methods) - {m for (m, _), seeds in planned.items() if seeds}
    assert not unplanned or name == "ogbench"  # some of its methods need a GPU
    found = {(score.method, score.task) for score in study.all_scores(finished(study))}
    assert all(planned[row] for row in found if row in planned)


class Diverging(Bandits):
    """Method `good` diverges."""

    def facts(self, key, folder):
        return {"method": key[0], "task": key[1], "seed": key[2]}

    def run(self, key, folder):
        if key[0] == "good":
            raise TrainingDiverged("The loss is not finite.")
        return super().run(key, folder)


def test_a_run_that_diverges_is_a_cell_with_the_score_of_a_failure(tmp_path):
    study = Diverging((0, 1))
    for job in jobs(study, tmp_path):
        job.run(tmp_path)
    cells = finished(study, tmp_path)
    assert all(job.is_done() for job in jobs(study, tmp_path))
    lost = next(job for job in jobs(study, tmp_path) if job.name == "bandits/good-easy-0")
    assert lost.describe() == "The loss is not finite."
    table = tabulate(study, cells)
    row = next(row for row in table.rows() if (row["task"], row["method"]) == ("easy", "good"))
    assert row["seeds"] == "2, 2 diverged" and row["verdict"] == "diverged: 2 of 2 runs diverged"
    assert DIVERGED in table.protocol()
    entry = next(entry for entry in table.entries if (entry.task, entry.method) == ("easy", "good"))
    assert entry.runs.means == {0: 0.0, 1: 0.0}


def test_a_run_that_diverges_has_no_value_of_a_measure_without_a_failure():
    class Timed(Diverging):
        def scores(self, cell):
            return [replace(score, measures={**score.measures, "steps": 5.0}) for score in super().scores(cell)]

        def contrasts(self, method, task):
            return () if method == "base" else (Contrast("base", "steps", larger=False),)

    study = Timed()
    cells = [run_cell(study, key, Path()) for key in study.cell_keys() if key[1] == "easy"]
    lost = [{**cell, "diverged": "NaN"} for cell in cells if cell["key"][0] == "same" and cell["seed"] == 0]
    kept = [cell for cell in cells if cell["key"] not in [each["key"] for each in lost]]
    row = rows_of(study, [*kept, *lost])["easy", "same"]
    assert row["verdict"] == "no value: 1 of 5 runs have no score"


def test_a_study_without_facts_fails_where_its_training_diverges(tmp_path):
    class Unknown(Diverging):
        def facts(self, key, folder):
            return {}

    with pytest.raises(TrainingDiverged):
        run_cell(Unknown(), ("good", "easy", 0), tmp_path)


def test_failed_cells_are_named_apart_from_missing_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    file = tmp_path / "work/bandits/good-easy-0/failed.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"error": "out of memory"}')
    assert failed(Bandits((0,)), tmp_path / "work") == ["`bandits/good-easy-0` (out of memory)"]


def test_cells_record_their_settings_and_run_again_after_a_default_changes(tmp_path, monkeypatch):
    class Trained(Bandits):
        def trainings(self, key):
            return {"run": ("task=hopper", "policy=gaussian", "algorithm=ppo", f"seed={key[2]}")}

    study = Trained((0,))
    key = study.cell_keys()[0]
    (job, *_) = jobs(study, tmp_path)
    job.run(tmp_path)
    (cell,) = finished(study, tmp_path)
    assert cell["configs"]["run"]["algorithm"]["clip"] == 0.2 and cell["configs"]["run"]["policy"]["name"] == "gaussian"
    old = {name: value for name, value in cell.items() if name != "configs"}
    assert current(study, old) and job.is_done()
    notes = tabulate(study, [old, cell]).notes()
    assert "1 of 2 cells have no recorded settings, so changed defaults do not show." in notes
    cell["configs"]["run"]["algorithm"]["clip"] = 0.3
    common.save_json(tmp_path / f"{study.cell_name(key)}.json", cell)
    assert not job.is_done() and finished(study, tmp_path) == []


@pytest.mark.parametrize("name", ["control", "control_million", "her", "offline", "pendulum"])
def test_studies_that_train_by_robopolicy_record_settings_of_every_learner(name):
    study = studies.load_study(name)
    without = {key[0] for key in study.cell_keys() if not study.trainings(key)}
    assert without == {method for method in study.methods if method.startswith("sb3_")}
    assert recorded(study.trainings(study.cell_keys()[-1])).keys() <= {"run"}


def test_there_is_no_mean_curve_where_a_seed_has_none():
    curve = [(100, 0.0), (200, 1.0)]
    cells = [{"method": "good", "task": "easy", "seed": seed, "wins": 90, "curve": curve} for seed in range(3)]
    assert tabulate(Bandits(), cells).entries[0].curve()
    cells[0]["curve"] = []
    assert not tabulate(Bandits(), cells).entries[0].curve()


def test_tables_contain_their_null_arm():
    study = Bandits()
    table = tabulate(study, cells_of(study))
    assert table.null is not None and table.null.table <= 0.05 and table.null.seeds == 5
    assert "of tables after Holm" in table.null_note() and table.figures()["null_covers"] == (6, 6)
    few = tabulate(study, [cell for cell in cells_of(study) if cell["seed"] < 100])
    assert few.null is None and "it needs 10 runs" in few.null_note()


def test_pooled_studies_judge_the_mean_over_the_tasks():
    class Pooled(Bandits):
        pooled = True

        def contrasts(self, method, task):
            return () if method == "base" or task != ALL else (Contrast("base", "score"),)

        def normalised(self, task, value):
            return value if task == "easy" else 2 * value

    study = Pooled()
    cells = [cell for cell in cells_of(study) if (cell["method"], cell["task"], cell["seed"]) != ("good", "hard", 0)]
    entries = {(entry.task, entry.method): entry for entry in tabulate(study, cells).entries}
    assert entries[ALL, "base"].runs.means[1] == pytest.approx((0.51 + 2 * 0.51) / 2)
    assert sorted(entries[ALL, "good"].runs.means) == [1, 2, 3, 4]  # one seed lacks a task
    verdicts = {key: entry.verdict.verdict for key, entry in entries.items() if entry.verdict}
    assert verdicts == {(ALL, "good"): "too few seeds", (ALL, "bad"): "behind", (ALL, "same"): "not applicable"}
    easy = tabulate(study, [cell for cell in cells if cell["task"] == "easy"])
    assert not any(entry.task == ALL for entry in easy.entries)  # a task is missing


def test_lower_can_be_better():
    class Lower(Bandits):
        def contrasts(self, method, task):
            return () if method == "base" else (Contrast("base", "success", larger=False),)

    study = Lower()
    assert rows_of(study, cells_of(study))["easy", "bad"]["verdict"] == "ahead"


def test_cells_run_in_the_queue_and_the_table_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    study = Bandits((0,))
    chosen = selected(jobs(study), ["*-easy-0"])
    for job in chosen:
        job.run(tmp_path)
    assert all(job.is_done() for job in chosen) and chosen[0].describe() == "50 wins"
    assert [job.seconds for job in jobs(study) if job.name == "bandits/base-easy-100"] == [
        2.0
    ]  # expected from its seed 0
    write_study(study, finished(study))
    assert "| easy | good |" in (tmp_path / "bandits.md").read_text()
    (made,) = json.loads((tmp_path / "bandits.json").read_text())["notes"]
    assert made == common.made_by_text(finished(study)) and f"{len(chosen)} on {common.machine()['cpu']}" in made
    with pytest.raises(UserError, match="No cell matches ppo"):
        selected(jobs(study), ["ppo*"])


def test_cells_with_other_settings_run_again(tmp_path):
    class Changed(Bandits):
        def is_current(self, cell):
            return cell.get("version") == 2

    study = Changed((0,))
    job = jobs(study, tmp_path)[0]
    common.save_json(tmp_path / f"{job.name}.json", study.run(study.cell_keys()[0], tmp_path))
    assert not job.is_done() and finished(study, tmp_path) == []
    assert jobs(Bandits((0,)), tmp_path)[0].is_done()


def test_the_queue_lists_missing_and_failed_cells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(queue, "load_study", lambda name: Bandits((0,)))
    monkeypatch.setattr(queue, "STUDIES", ("bandits",))
    first = jobs(Bandits((0,)))[0]
    first.run(tmp_path)
    failed = tmp_path / "work/bandits/good-easy-0/failed.json"
    failed.parent.mkdir(parents=True)
    failed.write_text('{"error": "no luck"}')
    monkeypatch.setattr("sys.argv", ["queue", "--list", "--work", str(tmp_path / "work"), "--cells", "*-easy-0"])
    assert queue.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "failed  bandits/good-easy-0: no luck" in lines[0] and "1 done, 1 failed, 2 missing" in lines[-1]


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_study_declares_unique_cells_and_known_methods(name):
    study = studies.load_study(name)
    names = [study.cell_name(key) for key in study.cell_keys()]
    assert study.name == name and len(names) == len(set(names)) and len(names) > 0
    assert study.quick().cell_keys()
    for method in study.methods:
        for task in (ALL, *study.tasks):
            assert {contrast.baseline for contrast in study.contrasts(method, task)} <= set(study.methods)


@pytest.mark.parametrize("name", studies.STUDIES)
def test_committed_cells_of_every_study_make_a_table(name):
    cells = finished(studies.load_study(name))
    if not cells:
        pytest.skip("no cell has run yet")
    table = tabulate(studies.load_study(name), cells)
    assert table.entries and len({tuple(row) for row in table.rows()}) == 1  # all rows have the same columns
    assert table.null is None or table.null.table <= 0.05


def test_published_scores_are_reached_within_their_interval_or_a_margin():
    assert Published(100.0, "x").reached_at == 90.0 and Published(-100.0, "x").reached_at == -110.0
    assert Published(0.9, "x", 0.85, 0.95).reached_at == 0.85
    assert Published(0.9, "x", 0.85, 0.95, margin=0.1).reached_at == pytest.approx(0.75)
