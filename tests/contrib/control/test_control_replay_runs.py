"""Tests of off-policy runs of the control theme: bit-identical resume after a kill, and refused settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from replay_runs import COMMON, assert_refused
from resumed_runs import assert_identical, kill_and_resume

from robopolicy.cli.main import main

FROM_SCRATCH = {
    "symphony": ["policy=swaddled", "algorithm.utd=1"],
    "optimistic_ac": ["algorithm.min_switch_interval=1", "algorithm.candidates=2"],
    "srl": ["policy=sequence"],
    "stock_ac": ["task.wrappers=[{name: stock, discount: 0.95}]", "algorithm.gamma=0.95"],
    "camel_td3": ["algorithm.mask.prior=point_mass_pd"],
    "tscac": ["algorithm.aux_rewards=[control_cost,velocity_cost]", "algorithm.stage1_fraction=0.5"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_from_scratch_runs_resume_bit_identically(name: str, tmp_path: Path) -> None:
    settings = [*COMMON, f"algorithm={name}", *FROM_SCRATCH[name]]
    settings = [*settings, "budget.updates=8", "checkpoint_every=3", f"out={tmp_path}", "replay.capacity=300"]
    assert main(["train", *settings, "name=whole"]) == 0
    assert_identical(tmp_path / "whole", kill_and_resume(settings, tmp_path))


@pytest.mark.parametrize("name", ["camel_sac", "camel_td3"])
def test_exploration_without_a_prior_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*COMMON, f"algorithm={name}", "budget.updates=1"]
    assert_refused(settings, "pass init_from=CHECKPOINT or algorithm.mask.prior=NAME", tmp_path, capsys)
