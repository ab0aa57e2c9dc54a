"""Tests of replays and of the calibration of the success head, with a world whose predictions are exact or late."""

import pytest
import torch
from small_world import small_films, small_world
from torch import Tensor

from robopolicy.evaluation.predicted_outcomes import PredictedOutcomes
from robopolicy.worldmodel.replays import Replays, calibrate_success, replay
from robopolicy.worldmodel.videos import VideoDataset
from robopolicy_tasks.toy.push import push, solved


@pytest.fixture(scope="module")
def videos() -> VideoDataset:
    return small_films(16)


def exact(videos: VideoDataset, monkeypatch: pytest.MonkeyPatch):
    """A world model with the true dynamics of the state vector, and a success head that reads it."""
    model = small_world(videos)
    model.fit_vectors(proprio=videos.proprio)

    def change(latent: Tensor, proprio: Tensor, actions: Tensor) -> Tensor:
        gripper, block = proprio[:, -1, :2], proprio[:, -1, 2:]
        after = torch.cat(push(gripper, block, actions[:, -1]), 1)
        return after - proprio[:, -1]

    def logits(latent: Tensor, proprio: Tensor) -> Tensor:
        return (4 * solved(proprio[:, 2:]).float() - 2)[:, None].repeat(1, 2)

    monkeypatch.setattr(model, "state_change", change)
    monkeypatch.setattr(model, "outcome_logits", logits)
    return model


def test_replays_in_the_true_dynamics_repeat_the_recorded_outcomes(videos, monkeypatch):
    found = replay(exact(videos, monkeypatch), videos)
    assert len(found.recorded) == videos.episodes.num_episodes
    assert found.recorded.tolist() == videos.episodes.success.tolist()
    assert torch.equal(found.logits > 0, found.recorded) and torch.equal(found.seen > 0, found.recorded)
    assert float(found.errors.max()) < 1e-4
    assert found.rates()["agreement"] == 1.0


def test_replays_of_a_frozen_state_differ_by_the_recorded_motion(videos, monkeypatch):
    model = exact(videos, monkeypatch)
    monkeypatch.setattr(model, "state_change", lambda latent, proprio, actions: torch.zeros_like(proprio[:, -1]))
    found = replay(model, videos, episodes=1)
    start = videos.proprio[0]
    expected = ((videos.proprio[1] - start) / model.proprio_std).square().mean().sqrt()
    assert float(found.errors[0]) == pytest.approx(float(expected), rel=1e-5)


def replays(recorded: list[bool], logits: list[float], seen: list[float]) -> Replays:
    return Replays(torch.tensor(recorded), torch.tensor(logits), torch.tensor(seen), torch.zeros(1))


def test_calibration_separates_recorded_and_replayed_outcomes():
    low, high = torch.tensor([0.2, 0.4]).logit().tolist()
    found = replays([True, True, False], [4.0, high, low], [5.0, 5.0, -9.0])
    assert found.bias == pytest.approx(-float(torch.tensor(0.3).logit()), abs=1e-5)  # halfway in probability


def test_calibration_does_not_follow_replays_that_lost_their_success():
    found = replays([True, True, True, False], [-13.0, -12.0, 6.0, -9.0], [6.0, 6.0, 6.0, -9.0])
    assert abs(found.bias) < 1  # two of three replays failed for other reasons


def test_one_kind_of_outcome_gives_no_offset():
    for outcome in (True, False):
        assert replays([outcome] * 2, [-1.0, -2.0], [-1.0, 3.0]).bias == 0.0


def test_each_half_of_the_episodes_is_tested_at_the_threshold_of_the_other_one():
    first, second = [torch.tensor(values).logit().tolist() for values in ([0.2, 0.4], [0.6, 0.8])]
    found = replays([False, True, False, True], [first[0], first[1], second[0], second[1]], [-9.0, 5.0, -9.0, 5.0])
    thresholds = torch.tensor([0.7, 0.7, 0.3, 0.3]).logit()  # halfway in probability; 0 and 1 are the first half
    calibrated = found.cross_calibrated()
    assert torch.allclose(calibrated.logits, found.logits - thresholds, atol=1e-5)
    assert torch.allclose(calibrated.seen, found.seen - thresholds, atol=1e-5)
    assert torch.equal(calibrated.recorded, found.recorded)


def test_a_half_without_both_outcomes_sets_no_offset():
    found = replays([True, False, False, False], [-3.0, -5.0, -6.0, -5.0], [-3.0, -5.0, -6.0, -5.0])
    assert torch.equal(found.cross_calibrated().logits == found.logits, torch.tensor([True, True, False, True]))
    assert torch.equal(replays([True], [-3.0], [-3.0]).cross_calibrated().logits, torch.tensor([-3.0]))


def test_a_model_that_predicts_at_random_rarely_passes_the_gate(videos, monkeypatch):
    """With the threshold of the tested replays themselves, 5 of 100 such models pass."""
    model, generator = small_world(videos), torch.Generator().manual_seed(0)

    def random_replays(*_) -> Replays:
        logits, seen = torch.randn(2, 128, generator=generator)
        return Replays(torch.arange(128) < 8, logits, seen, torch.zeros(1))

    monkeypatch.setattr("robopolicy.worldmodel.replays.replay", random_replays)
    passed = [not PredictedOutcomes.of(calibrate_success(model, videos)).reasons() for _ in range(400)]
    assert sum(passed) <= 8


def test_calibration_sets_the_offset_of_the_success_head_whatever_it_was(videos, monkeypatch):
    model = exact(videos, monkeypatch)
    exact_logits = model.outcome_logits
    monkeypatch.setattr(model, "outcome_logits", lambda latent, proprio: exact_logits(latent, proprio) - 3)
    for before in (0.0, 20.0):
        model.success_bias.fill_(before)
        found = calibrate_success(model, videos)
        assert found.rates()["agreement"] == 1.0 and found.rates()["detected"] == found.rates()["recorded"]
        assert float(model.success_bias) == pytest.approx(-torch.tensor([-1.0, -5.0]).sigmoid().mean().logit().item())
