"""Tests of `robopolicy compose --then correct=CKPT`: corrected actions, search, and refused input."""

from __future__ import annotations

import json

import pytest
import torch
from composition_parents import TASK, composed, parents, save_judge, trained_parents

from robopolicy.cli.main import main
from robopolicy.contrib.offline.corrected import CorrectedPolicy, Correction, DataModel, DataModelConfig, correct
from robopolicy.policies.wrappers.best_of_n import BestOfNPolicy
from robopolicy.policies.wrappers.composed import ComposedPolicy
from robopolicy.training.checkpoint import load_policy, save_checkpoint

__all__ = ["parents", "trained_parents"]  # fixtures


@pytest.fixture
def helpers(parents):
    """Checkpoints of a critic and of a data model for compositions of the parents."""
    save_judge()
    both = composed()
    data = correct(both, DataModel(DataModelConfig(hidden=(8,)), both), Correction())
    save_checkpoint("data", data, task=TASK, obs_sample={"state": torch.rand(2, 2, 6)})


def test_a_corrected_best_of_n_policy_is_saved_as_a_checkpoint(parents, helpers):
    argv = ["--critic", "judge", "--override", "candidates=3", "--then", "correct=data"]
    assert main(["compose", *parents, *argv, "--out", "both"]) == 0
    assert load_policy("both")[0].name == "corrected" and main(["verify", "both"]) == 0


def test_grid_search_supports_a_corrected_best_of_n_policy(parents, helpers, capsys):
    argv = ["--critic", "judge", "--override", "candidates=2", "then.correct.limit=0.1", "--then", "correct=data"]
    search = ["--search", "grid", "--divisions", "2", "--episodes", "2", "--report-episodes", "2"]
    assert main(["compose", *parents, *argv, *search, "--out", "both", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    policy, manifest = load_policy("both")
    assert isinstance(policy, CorrectedPolicy) and isinstance(policy.base, BestOfNPolicy)
    assert policy.config.correction.limit == 0.1 and policy.base.config.candidates == 2
    assert isinstance(policy.base.base, ComposedPolicy)
    assert list(policy.base.base.operator.nominal(2)) == printed["weights"]
    assert [parent.policy for parent in manifest.parents] == ["flow", "diffusion", "selected", "corrected"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--then", "correct=left"], "pass a checkpoint of algorithm=cdsa"),
        (["--then", "corect=left"], "Unknown step of --then 'corect'. Did you mean 'correct'?"),
        (["--then", "correct=left", "correct=right"], "'correct' twice"),
        (["--override", "then.correct.limit=1"], "pass --then correct=CKPT"),
        (["--override", "then.correct=1"], "write --override then.NAME.KEY=VALUE"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(parents, argv, message, tmp_path, refused):
    before = sorted(tmp_path.iterdir())
    assert message in refused("compose", *parents, "--out", "both", *argv)
    assert sorted(tmp_path.iterdir()) == before
