"""Tests of learned judges on videos of the pushing toy: predictions, calibration, abstention, and refused inputs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from films import push_films
from safetensors.torch import save_file
from small_world import small_films, small_world

from robopolicy.errors import UserError
from robopolicy.evaluation.judge_metrics import episode_confusions, frame_confusions
from robopolicy.evaluation.video_metrics import compare_videos
from robopolicy.nets.vision import VisionConfig
from robopolicy.worldmodel.contract import Images
from robopolicy.worldmodel.success_detectors.classifier import StateProbe, disagreement, fit_classifier, fit_probe
from robopolicy.worldmodel.success_detectors.clips import (
    Examples,
    FitConfig,
    JudgeConfig,
    best_threshold,
    fit_temperature,
    reliability,
)
from robopolicy.worldmodel.success_detectors.store import load_classifier, load_probe, save_judge
from robopolicy.worldmodel.videos import VideoDataset, infer_spec, split_episodes
from robopolicy_tasks.toy.push import GOAL, RADIUS

CONFIG = JudgeConfig(members=2, hidden=(32,), vision=VisionConfig(widths=(16, 32), keypoints=8, crop=1.0))
FIT = FitConfig(steps=150, batch_size=64, learning_rate=3e-3)


def solved(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return (state["block"] - torch.tensor(GOAL)).norm(dim=1) < RADIUS


def load_any_probe(folder: Path) -> StateProbe:
    return load_probe(folder, solved)


def blurred(images: Images) -> Images:
    """Blurs frames like an autoencoder."""
    small = {camera: F.avg_pool2d(frames.float(), 2) for camera, frames in images.items()}
    return {camera: F.interpolate(x, scale_factor=2.0).round().to(torch.uint8) for camera, x in small.items()}


@pytest.fixture(scope="module")
def examples() -> tuple[Examples, Examples]:
    """Returns training and held-out examples, with original and blurred frames."""
    episodes = push_films(60, size=24)
    spec = infer_spec(episodes)
    train, held_out = (VideoDataset(spec, part) for part in split_episodes(episodes, share=0.3))
    return Examples.from_videos(train, blurred), Examples.from_videos(held_out, blurred)


@pytest.fixture(scope="module")
def classifier(examples):
    return fit_classifier(*examples, CONFIG, FIT)


@pytest.fixture(scope="module")
def probe(examples):
    return fit_probe(*examples, ("gripper", "block"), solved, config=CONFIG, fit=FIT)


def every(examples: Examples, view: int = 0) -> tuple[Images, torch.Tensor]:
    return examples.clips(torch.arange(len(examples)), 2, view), examples.videos.proprio[:, None]


@pytest.mark.parametrize("view", [0, 1])
def test_the_classifier_recognises_success_on_real_and_blurred_frames(classifier, examples, view):
    judgement = classifier(*every(examples[1], view))
    truth = examples[1].videos.success.bool()
    predicted = judgement.success >= classifier.threshold
    assert (predicted == truth)[truth].float().mean() > 0.8 and (predicted == truth)[~truth].float().mean() > 0.9
    progress = examples[1].videos.progress
    assert np.corrcoef(judgement.progress.numpy(), progress.numpy())[0, 1] > 0.4
    assert judgement.uncertain.float().mean() < 0.15


def test_probability_is_calibrated_despite_balanced_training(classifier, examples):
    rate = float(examples[0].videos.success.mean())
    assert classifier.offset == pytest.approx(np.log(rate / (1 - rate))) and classifier.offset < -2
    probability = classifier(*every(examples[1])).success
    assert reliability(probability, examples[1].videos.success.numpy()).error < 0.03


def test_probe_predicts_the_state_and_matches_the_success_of_the_task(probe, examples):
    videos = examples[1].videos
    clips, proprio = every(examples[1], 1)
    read = probe.predict_state(clips)
    block = torch.from_numpy(videos.episodes.arrays["block"])
    assert (read["block"] - block).norm(dim=1).mean() < 0.05  # [m], on a table of 1 m
    judgement = probe(clips, proprio)
    assert ((judgement.success >= 0.5) == videos.success.bool()).float().mean() > 0.93
    assert solved({"block": block})[videos.success.bool()].all()  # the predicate equals the simulator's


def test_members_disagree_on_an_empty_table_and_the_spread_limit_sets_abstention(classifier, probe, examples):
    clips, proprio = every(examples[1])
    empty = {"top": torch.full_like(clips["top"], 217)}
    usual, strange = (disagreement(probe.ensemble.predict(frames)).mean() for frames in (clips, empty))
    assert strange > 1.3 * usual
    assert float(probe(clips, proprio).uncertain.float().mean()) == pytest.approx(CONFIG.abstain, abs=0.05)
    for judge in (classifier, probe):
        assert replace(judge, spread=-1.0)(clips, proprio).uncertain.all()
        assert not replace(judge, spread=np.inf)(clips, proprio).uncertain.any()


def test_confusions_of_frames_and_episodes_on_both_kinds_of_frames(classifier, examples):
    videos = examples[1].videos
    for confusions, count in ((frame_confusions, len(videos)), (episode_confusions, videos.episodes.num_episodes)):
        found = confusions(classifier, examples[1], classifier.threshold)
        assert list(found) == ["as filmed", "as reconstructed"]
        for confusion in found.values():
            parts = (confusion.true_positives, confusion.false_negatives, confusion.false_positives)
            assert sum(parts) + confusion.true_negatives + confusion.abstained == count
            assert confusion.sensitivity is not None and confusion.sensitivity.estimate > 0.7
    sure = episode_confusions(replace(classifier, spread=-1.0), examples[1], classifier.threshold)["as filmed"]
    assert sure.true_positives == 0 and sure.abstained >= videos.episodes.success.sum()  # the judge abstains everywhere


def test_judgement_depends_only_on_the_last_frame_of_its_row(classifier, examples):
    clips, proprio = every(examples[1])
    whole = classifier(clips, proprio)
    alone = classifier({"top": clips["top"][5:6, -1:]}, proprio[5:6])
    assert alone.success[0] == pytest.approx(float(whole.success[5]), abs=1e-5)


def test_judge_round_trips_through_its_folder(classifier, probe, examples, tmp_path):
    clips, proprio = every(examples[1])
    save_judge(tmp_path / "classifier", classifier)
    loaded = load_classifier(tmp_path / "classifier")
    assert torch.equal(loaded(clips, proprio).success, classifier(clips, proprio).success)
    assert (loaded.threshold, loaded.spread) == (classifier.threshold, classifier.spread)
    save_judge(tmp_path / "probe", probe)
    again = load_probe(tmp_path / "probe", solved)
    assert torch.equal(again.predict_state(clips)["block"], probe.predict_state(clips)["block"])
    with pytest.raises(UserError, match="expected SuccessClassifier"):
        load_classifier(tmp_path / "probe")
    (tmp_path / "probe" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="complete"):
        load_probe(tmp_path / "probe", solved)


def test_damaged_files_of_a_judge_are_reported(classifier, probe, tmp_path):
    for name, judge, load in (("classifier", classifier, load_classifier), ("probe", probe, load_any_probe)):
        folder = tmp_path / name
        save_judge(folder, judge)
        facts = json.loads((folder / "judge.json").read_text())
        damaged = [[], 3, "text", {}, {**facts, "config": []}, {**facts, "cameras": []}, {**facts, "spread": "wide"}]
        damaged += [{key: value for key, value in facts.items() if key != missing} for missing in facts]
        damaged += [{**facts, "cameras": {"a.b": 24}}, {**facts, "config": {**facts["config"], "hidden": [8]}}]
        damaged += [{**facts, key: {} if key == "names" else -1} for key in ("temperature", "names") if key in facts]
        for content in damaged:
            (folder / "judge.json").write_text(json.dumps(content))
            with pytest.raises(UserError) as found:
                load(folder)
            assert str(folder) in str(found.value) and "\n" not in str(found.value)
        (folder / "judge.json").write_text(json.dumps(facts))
        load(folder)
    save_file({"std": torch.ones(4)}, tmp_path / "probe" / "model.safetensors")
    with pytest.raises(UserError, match="do not match"):
        load_any_probe(tmp_path / "probe")


def test_fitting_is_deterministic_for_a_seed(examples):
    quick = replace(FIT, steps=2)
    first, second = (fit_classifier(*examples, CONFIG, quick) for _ in range(2))
    states = zip(first.ensemble.state_dict().values(), second.ensemble.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)


def test_unsuitable_frames_and_data_are_refused(classifier, examples):
    clips, proprio = every(examples[1])
    with pytest.raises(UserError, match="camera 'top' with 24x24 pixels"):
        classifier({"side": clips["top"]}, proprio)
    with pytest.raises(UserError, match="24x24 pixels, got"):
        classifier({"top": clips["top"][..., :16, :16]}, proprio)
    with pytest.raises(UserError, match="no observation 'drawer'"):
        fit_probe(*examples, ("drawer",), solved, config=CONFIG, fit=FIT)
    episodes = push_films(8, size=24)
    losers = VideoDataset(infer_spec(episodes), episodes.subset(~episodes.success))
    with pytest.raises(UserError, match="both classes"):
        fit_classifier(Examples.from_videos(losers), examples[1], CONFIG, FIT)


def test_world_model_head_judges_its_reconstructed_frames():
    videos = small_films()
    model = small_world(videos)
    examples = Examples.from_videos(videos, lambda frames: model.decode(model.encode(frames)))
    shown = examples.clips(torch.arange(5), 3, view=1)["top"]
    assert shown.shape == (5, 3, 3, 16, 16) and shown.dtype == torch.uint8
    for confusion in frame_confusions(model.judge, examples).values():
        assert confusion.abstained == 0
    found = compare_videos(
        examples.clips(torch.arange(20), 3, 1), examples.clips(torch.arange(20), 3), encode=model.encode
    )
    assert found.sets[1] > 0 and found.frames["SSIM"][1].estimate < 1


def test_temperature_recovers_a_scale_of_the_logits():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=20_000) * 2
    labels = rng.random(20_000) < 1 / (1 + np.exp(-logits))
    assert fit_temperature(logits, labels) == pytest.approx(1, abs=0.05)
    assert fit_temperature(3 * logits, labels) == pytest.approx(3, abs=0.15)
    assert fit_temperature([-4.0, -2.0, 2.0, 4.0], [0, 0, 1, 1]) > 0.5  # no errors, but finite confidence


def test_reliability_equals_hand_computed_values():
    found = reliability([0.05, 0.15, 0.95, 0.95, 1.0], [0, 0, 1, 0, 1], bins=2)
    assert found.confidence == pytest.approx([0.1, 2.9 / 3]) and found.frequency == pytest.approx([0, 2 / 3])
    assert found.count.tolist() == [2, 3] and found.error == pytest.approx((2 * 0.1 + 3 * 0.3) / 5)


def test_the_threshold_separates_the_classes_halfway():
    assert best_threshold([0.1, 0.2, 0.6, 0.9], [0, 0, 1, 1]) == pytest.approx(0.4)
    assert best_threshold([0.1, 0.3, 0.2, 0.9], [0, 0, 1, 1]) in (pytest.approx(0.15), pytest.approx(0.6))
    assert best_threshold([0.1, 0.9], [1, 1]) == 0.5
