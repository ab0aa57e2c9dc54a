"""Checkpoints that were written before the renames of 0.1.0 open under their present names and compute the same."""

from pathlib import Path

import pytest

from robopolicy.training.checkpoint import load_policy, verify_checkpoint

EARLIER = sorted((Path(__file__).parent / "checkpoints_before_0_1").iterdir())


@pytest.mark.parametrize("folder", EARLIER, ids=lambda folder: folder.name)
def test_a_checkpoint_repeats_its_golden_chunk(folder: Path) -> None:
    report = verify_checkpoint(folder)
    assert report.ok, report
    policy, manifest = load_policy(folder)
    assert policy.spec.action_horizon == manifest.policy_spec.action_horizon == 2
