"""Tests of walking metrics: smoothness, falls and velocity error."""

import pytest
import torch

from benchmarks.walking import ROBOTS, _smoothness, row, walk
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy_tasks.velocity.go1 import ACTION_SCALE, Go1
from robopolicy_tasks.velocity.randomization import NOMINAL, TRAINING


def test_smoothness_is_the_speed_and_acceleration_of_joint_targets() -> None:
    speed, jerk = _smoothness([torch.full((2, 12), value) for value in (0.0, 0.1, 0.4)], dt=0.02)
    assert speed.tolist() == pytest.approx([0.3 * ACTION_SCALE / 0.02] * 2)
    assert jerk.tolist() == pytest.approx([0.2 * ACTION_SCALE / 0.02**2] * 2)


def test_an_untrained_policy_neither_falls_nor_tracks_the_velocity() -> None:
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianConfig(normalization="identity"), PolicySpec({"state": (45,)}, 12))
    task = Go1("velocity/go1", "sparse", NOMINAL)
    task.max_episode_steps = 100
    found = walk(policy, task, 4)
    assert not found.fallen.any() and (found.velocity_error > 0.2).any()
    line, figures = row("stand", found)
    assert line["falls"] == "0 of 4" and figures["n"] == 4
    assert figures["velocity_error"]["value"] == pytest.approx(found.velocity_error.mean())


def test_exactly_one_robot_is_nominal() -> None:
    assert ROBOTS["as in training"] is TRAINING
    assert sum(ranges == NOMINAL for ranges in ROBOTS.values()) == 1
