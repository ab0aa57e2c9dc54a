"""Tests that checkpoints of version 0.1.0 load under the current names and compute the same chunks."""

from pathlib import Path

import pytest

from robopolicy.training.checkpoint import load_policy, verify_checkpoint

EARLIER = sorted((Path(__file__).parent / "checkpoints_0_1_0").iterdir())


@pytest.mark.parametrize("folder", EARLIER, ids=lambda folder: folder.name)
def test_a_checkpoint_reproduces_its_golden_chunk(folder: Path) -> None:
    report = verify_checkpoint(folder)
    assert report.ok, report
    policy, manifest = load_policy(folder)
    assert policy.spec.action_horizon == manifest.policy_spec.action_horizon == 2
