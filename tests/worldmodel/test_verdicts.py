"""Tests of the gates of world models at the edge of every threshold, and of the measured effects of actions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_world import small_films
from test_diagnostics import TrueWorld

from robopolicy.worldmodel.action_following import ActionFollowingReport, action_sweep, check_gates
from robopolicy.worldmodel.videos import VideoDataset, infer_spec


def following(shuffled: float, zero: float, share: float = 1.0) -> ActionFollowingReport:
    """Returns the report of a model that predicts true actions at 20 dB."""
    psnr = {"true": {1: 20.0}, "shuffled": {1: 20.0 - shuffled}, "zero": {1: 20.0 - zero}}
    return ActionFollowingReport(psnr, {"x": share}, 16)


@pytest.mark.parametrize(
    ("found", "failures", "passed"),
    [
        (following(0.5, 0.5), 0.05, True),
        (following(0.49, 5.0), 0.05, False),
        (following(5.0, 0.49), 0.05, False),
        (following(math.nan, 5.0), 0.05, False),  # an unmeasured gap fails
        (following(5.0, math.nan), 0.05, False),
        (following(5.0, 5.0, share=0.9), 0.05, True),
        (following(5.0, 5.0, share=0.89), 0.05, False),
        (following(5.0, 5.0), 0.049, False),
        (following(5.0, 5.0), None, True),  # a task without success
    ],
)
def test_gates_use_exact_thresholds(found: ActionFollowingReport, failures: float | None, passed: bool) -> None:
    verdict = check_gates(found, failures=failures)
    assert verdict.passed == passed and len(verdict.reasons) == (not passed)


class Mirrored(TrueWorld):
    """The same world with a negated state vector."""

    def reset(self, images, proprio, **options):
        return super().reset(images, -proprio, **options)

    def step(self, state, actions):
        after, frames = super().step(state, actions)
        return after, replace(frames, proprio=-frames.proprio)


def test_action_directions_come_from_the_data() -> None:
    videos = small_films(16)
    arrays = videos.episodes.arrays
    episodes = replace(videos.episodes, arrays=arrays | {key: -arrays[key] for key in videos.spec.proprio})
    mirrored = VideoDataset(infer_spec(episodes), episodes)
    assert set(action_sweep(Mirrored(mirrored.spec), mirrored).values()) == {1.0}
    assert set(action_sweep(TrueWorld(mirrored.spec), mirrored).values()) == {0.0}


def test_action_without_an_effect_in_the_data_is_skipped() -> None:
    episodes = small_films(16).episodes
    idle = np.random.default_rng(0).normal(size=(len(episodes), 1)).astype(np.float32)
    action = np.concatenate([episodes.arrays["action"], idle], 1)
    wider = replace(episodes, arrays=episodes.arrays | {"action": action}, names={})
    videos = VideoDataset(infer_spec(wider), wider)

    class IgnoresThirdAction(TrueWorld):
        def step(self, state, actions):
            return super().step(state, actions[..., :2])

    assert action_sweep(IgnoresThirdAction(videos.spec), videos) == {"action 0": 1.0, "action 1": 1.0}
    assert torch.equal(videos.actions[:, 2], torch.from_numpy(idle[:, 0]))
