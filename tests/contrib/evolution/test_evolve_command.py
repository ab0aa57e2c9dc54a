"""Tests of `robopolicy evolve`: gradient-free search from a checkpoint, and refused options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.training.checkpoint import load_policy

SIZES = ["--generations", "2", "--population", "4", "--episodes", "4", "--report-episodes", "4"]


@pytest.mark.parametrize("search", ["cmaes", "deep_ga", "archive"])
def test_evolve_searches_from_a_checkpoint_and_reports_on_other_episodes(
    search: str, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if search == "cmaes":
        pytest.importorskip("cma")
    base, out = clone / "checkpoints" / "last", tmp_path / "evolved"
    assert main(["evolve", str(base), "--out", str(out), "--search", search, *SIZES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["best"]) == 2 and found["results"].keys() == {"before", "evolved"}
    (before, _), (after, manifest) = load_policy(base), load_policy(out)
    changed = [name for name, value in after.named_parameters() if not torch.equal(value, before.get_parameter(name))]
    assert len(changed) <= 1 and manifest.task == "toy/point_mass"  # only the last matrix
    assert [parent.policy for parent in manifest.parents] == ["flow"]
    assert main(["verify", str(out)]) == 0


def test_invalid_options_are_refused_in_one_line(clone: Path, tmp_path: Path, refused) -> None:
    base = ["evolve", clone / "checkpoints" / "last", "--out", tmp_path / "evolved"]
    assert "known prefixes" in refused(*base, "--parameters", "nothing")
    assert "at least 4" in refused(*base, "--population", "2")
    assert "sigma" in refused(*base, "--sigma", "0")
    assert "overlap" in refused(*base, "--report-seed", "20000")


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evolve", "--help"])
    assert "--generations" in capsys.readouterr().out
