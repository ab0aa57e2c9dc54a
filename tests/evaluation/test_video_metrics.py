"""Tests of video similarity metrics against hand-computed values, scikit-image and scipy."""

import math
import types

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from robopolicy.errors import UserError
from robopolicy.evaluation import video_metrics
from robopolicy.evaluation.video_metrics import LPIPS, clip_features, compare_videos, frame_ssim, frechet_distance
from robopolicy.worldmodel.action_following import frame_psnr


def flat_video(value: float, rows: int = 1, length: int = 1, size: int = 16) -> dict[str, torch.Tensor]:
    return {"top": torch.full((rows, length, 3, size, size), value).to(torch.uint8)}


def random_video(seed: int, rows: int = 2, length: int = 3, size: int = 20) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"top": torch.randint(0, 256, (rows, length, 3, size, size), dtype=torch.uint8, generator=generator)}


def shifted(images: dict[str, torch.Tensor], amount: int) -> dict[str, torch.Tensor]:
    return {camera: clip.roll(amount, -1) for camera, clip in images.items()}


def test_ssim_of_constant_images_equals_the_hand_computed_value():
    c1 = (0.01 * 255) ** 2
    expected = (2 * 100 * 150 + c1) / (100**2 + 150**2 + c1)  # only the luminance term
    assert frame_ssim(flat_video(100), flat_video(150)).item() == pytest.approx(expected, rel=1e-6)
    assert frame_ssim(random_video(0), random_video(0)).flatten().tolist() == pytest.approx([1.0] * 6)
    inverted = {"top": 255 - random_video(0)["top"]}
    assert frame_ssim(inverted, random_video(0)).max() < -0.5  # inverted structure


def test_ssim_and_psnr_agree_with_scikit_image():
    metrics = pytest.importorskip("skimage.metrics")
    real, other = random_video(0), random_video(1)
    mixed = {"top": (0.7 * real["top"].float() + 0.3 * other["top"].float()).to(torch.uint8)}
    similarity, ratio = frame_ssim(mixed, real), frame_psnr(mixed, real)
    for row in range(2):
        for t in range(3):
            a, b = (side["top"][row, t].permute(1, 2, 0).numpy() for side in (mixed, real))
            options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
            expected = metrics.structural_similarity(a, b, channel_axis=2, data_range=255, **options)
            assert float(similarity[row, t]) == pytest.approx(expected, abs=1e-6)
            assert float(ratio[row, t]) == pytest.approx(metrics.peak_signal_noise_ratio(b, a), abs=1e-3)


def test_ssim_refuses_images_smaller_than_its_window():
    with pytest.raises(UserError, match="11 pixels"):
        frame_ssim(flat_video(0, size=8), flat_video(0, size=8))


def test_frechet_distance_equals_hand_computed_values():
    grid = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])  # covariance 4/3 of the identity
    assert frechet_distance(grid, grid) == pytest.approx(0)
    assert frechet_distance(grid, grid + np.array([3, 4])) == pytest.approx(25)
    assert frechet_distance(grid, 2 * grid) == pytest.approx(2 * (4 / 3))  # (2 - 1)^2 * variance, in two dimensions
    assert frechet_distance(grid[:, :1], 3 * grid[:, :1]) == pytest.approx(4 * (4 / 3))
    with pytest.raises(ValueError, match="two samples"):
        frechet_distance(grid[:1], grid)


def test_frechet_distance_equals_scipys_matrix_square_root_form():
    linalg = pytest.importorskip("scipy.linalg")
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(60, 5)) @ rng.normal(size=(5, 5)), rng.normal(size=(50, 5)) @ rng.normal(size=(5, 5)) + 1
    c, d = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(c + d - 2 * linalg.sqrtm(c @ d).real)
    assert frechet_distance(a, b) == pytest.approx(expected) == pytest.approx(frechet_distance(b, a))
    flat = a[:, [0, 0, 0]]  # singular covariances
    assert math.isfinite(frechet_distance(flat, flat[:30])) and frechet_distance(flat, flat) == pytest.approx(
        0, abs=1e-6
    )


def encode(images: dict[str, torch.Tensor]) -> torch.Tensor:
    return images["top"].float() / 255


def test_clip_features_depend_on_colour_position_and_motion():
    still, moving = flat_video(100, length=4), random_video(0, rows=1, length=4, size=16)
    features = clip_features(encode, still)
    assert (
        features.shape == (1, 2 * 3 * 4) and features[0, :12] == pytest.approx(100 / 255) and not features[0, 12:].any()
    )
    assert (clip_features(encode, moving)[0, 12:] > 0).all()
    assert not clip_features(encode, flat_video(100))[0, 12:].any()  # one frame has no motion


def test_videos_are_compared_by_horizon():
    real = random_video(0, rows=6, length=12)
    noise = random_video(1, rows=6, length=12)["top"].float() - 128
    drift = torch.linspace(0.02, 0.5, 12)[None, :, None, None, None]
    worse = {"top": (real["top"].float() + drift * noise).clamp(0, 255).to(torch.uint8)}
    found = compare_videos(worse, real, encode=encode, features="pixels")
    ratio, similarity = (found.frames[name] for name in ("PSNR [dB]", "SSIM"))
    assert list(ratio) == [1, 5, 10] == list(similarity) == list(found.sets)
    for metric in (ratio, similarity):
        assert metric[1].estimate > metric[5].estimate > metric[10].estimate
    header, rows = found.table()
    assert header == ["frames ahead", "PSNR [dB]", "SSIM", "FVD-own (pixels)"] and [row[0] for row in rows] == [
        "1",
        "5",
        "10",
    ]
    assert compare_videos(real, real, encode=encode).sets[10] == pytest.approx(0, abs=1e-9)
    assert compare_videos(worse, real).table()[0][-1] == "SSIM" and found.to_dict()["films"] == 6


def test_mismatched_videos_are_refused():
    real = random_video(0)
    with pytest.raises(UserError, match="equal cameras and shapes"):
        compare_videos({"side": real["top"]}, real)
    with pytest.raises(UserError, match="equal cameras and shapes"):
        compare_videos({"top": real["top"][:, :2]}, real)
    with pytest.raises(UserError, match="3 frames"):
        compare_videos(real, real, horizons=(5, 10))


def test_lpips_states_the_missing_file(tmp_path):
    with pytest.raises(UserError, match="safetensors"):
        LPIPS(tmp_path / "alexnet.safetensors")


class Net(torch.nn.Module):
    """Named like AlexNet in the lpips package: slices of torchvision's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.slice1 = torch.nn.Sequential()
        self.slice1.add_module("0", torch.nn.Conv2d(3, 2, 1))
        self.slice2 = torch.nn.Sequential()
        self.slice2.add_module("3", torch.nn.Conv2d(2, 2, 1))


class Metric(torch.nn.Module):
    def __init__(self, net: str, pnet_rand: bool, verbose: bool) -> None:
        super().__init__()
        assert net == "alex" and pnet_rand  # nothing may be downloaded
        self.net = Net()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).abs().mean((1, 2, 3), keepdim=True) * self.net.slice1[0].weight.mean()


def test_lpips_loads_torchvision_weights_and_scales_images_to_minus_one_one(tmp_path, monkeypatch):
    monkeypatch.setattr(video_metrics, "require", lambda *_: types.SimpleNamespace(LPIPS=Metric))
    weights = {
        f"features.{i}.{name}": torch.ones_like(value)
        for i, part in ((0, "slice1"), (3, "slice2"))
        for name, value in getattr(Net(), part)[0].state_dict().items()
    }
    save_file(weights | {"classifier.1.weight": torch.zeros(1)}, tmp_path / "alexnet.safetensors")
    metric = LPIPS(tmp_path / "alexnet.safetensors")
    assert metric(flat_video(0, 2, 3), flat_video(255, 2, 3)).tolist() == [[2.0] * 3] * 2
    found = compare_videos(flat_video(0, 2, 3), flat_video(255, 2, 3), lpips=metric)
    assert found.frames["LPIPS"][1].estimate == 2.0
    save_file({"features.0.weight": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="does not hold"):
        LPIPS(tmp_path / "other.safetensors")
