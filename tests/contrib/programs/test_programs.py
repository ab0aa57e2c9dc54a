"""Tests of the program search: monotone best score, no repeated programs, and exact resume."""

from __future__ import annotations

import json

import numpy as np
import pytest

from robopolicy.contrib.programs.search import WORST, ProgramSearch, TreeMutation, refine
from robopolicy.errors import UserError

START = json.dumps({"kind": "action", "control": ["0.1"], "until": "x[0] > 1"})


class Silent:
    """Proposes nothing."""

    def propose(self, best, rng):
        return None


class Digits:
    """Proposes random three-digit numbers."""

    def propose(self, best, rng):
        return str(rng.integers(100, 1000))


def score_programs(programs):
    return [(-abs(int(program) - 555.0), f"off by {abs(int(program) - 555)}") for program in programs]


def new_search(**settings):
    return ProgramSearch(["100"], Digits(), **{"population": 6, "seed": 3, **settings})


def test_the_best_score_never_falls_and_no_program_is_tried_twice():
    search = new_search()
    best = refine(search, score_programs, rounds=30)
    programs = [trial.program for trial in search.trials]
    assert len(set(programs)) == len(programs) == 1 + 30 * 6
    assert len(search.curve) == 31 and (np.diff(search.curve) >= 0).all()
    assert best.score == max(trial.score for trial in search.trials) == search.curve[-1]
    assert best.feedback == f"off by {int(-best.score)}"


def test_an_interrupted_search_resumes_to_the_same_result(tmp_path):
    whole, record = new_search(), tmp_path / "search.json"
    refine(whole, score_programs, rounds=8)

    def killed(programs):
        if "555" in programs or len(first.curve) == 4:
            raise KeyboardInterrupt
        return score_programs(programs)

    first = new_search()
    with pytest.raises(KeyboardInterrupt):
        refine(first, killed, 8, record, {"task": "t"})
    second = new_search()
    refine(second, score_programs, 8, record, {"task": "t"})
    assert second.state_dict() == whole.state_dict()
    with pytest.raises(UserError, match="has task 't', but 'other' is given"):
        refine(new_search(), score_programs, 9, record, {"task": "other"})


def test_a_damaged_record_is_refused(tmp_path):
    record = tmp_path / "search.json"
    record.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        refine(new_search(), score_programs, 1, record)
    record.write_text(json.dumps({"version": 0, "request": {}, "search": {}}))
    with pytest.raises(UserError, match="has version 0"):
        refine(new_search(), score_programs, 1, record)


@pytest.mark.parametrize(
    ("request_", "changes"),
    [
        ([], {}),
        (None, {}),
        ({"task": "t"}, {"random": {}}),
        ({"task": "t"}, {"curve": 1}),
        ({"task": "t"}, {"trials": [{"program": "1"}]}),
        ({"task": "t"}, {"asked": [1]}),
    ],
)
def test_a_record_with_wrong_types_is_refused(request_, changes, tmp_path):
    record = tmp_path / "search.json"
    search = {**new_search().state_dict(), **changes}
    record.write_text(json.dumps({"version": 1, "request": request_, "search": search}))
    with pytest.raises(UserError, match=r"search\.json (is damaged|has task None)") as refused:
        refine(new_search(), score_programs, 1, record, {"task": "t"})
    assert "\n" not in str(refused.value)


def test_a_nan_score_ranks_last_and_ties_prefer_the_shorter_program():
    search = ProgramSearch(["long program", "short", "none"], Digits())
    assert search.ask() == ["long program", "short", "none"]
    search.tell([1.0, 1.0, float("nan")])
    assert search.best.program == "short" and search.trials[2].score == WORST
    with pytest.raises(UserError, match="population and parents of at least 1"):
        ProgramSearch([], Digits(), population=0)
    with pytest.raises(UserError, match="No program has been evaluated"):
        _ = ProgramSearch([], Digits()).best


def test_a_proposer_without_proposals_leaves_rounds_empty():
    search = ProgramSearch(["1"], Silent())
    assert refine(search, score_programs, 3).program == "1" and search.curve == [-554.0] * 4


def test_tree_mutation_optimises_a_constant_from_scores():
    def score_constant(programs):
        return [(-abs(float(json.loads(program)["control"][0]) - 2.0), "") for program in programs]

    def accept(program):
        if set(json.loads(program)["control"]) & {"0"}:
            raise UserError("no")

    search = ProgramSearch([START], TreeMutation(accept), population=8, seed=0)
    assert refine(search, score_constant, 25).score > -0.05
