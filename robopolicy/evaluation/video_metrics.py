"""Metrics of predicted videos against recorded ones, per frame and per distribution, by horizon.

PSNR and SSIM (Wang et al. 2004) compare frames; LPIPS (Zhang et al. 2018) compares features of a trained network and
needs its package and weights; a Frechet distance compares the distributions of clips. FVD is the Frechet distance for
the features of the I3D network, whose weights are a download. In features of another encoder it is a different metric,
`FVD-own`, which can only compare models on the same videos and features.

Similar frames are neither necessary nor sufficient for evaluating policies: see the action-following tests
(`robopolicy.worldmodel.action_following`) and the ranking (`robopolicy.evaluation.ranking`). All functions take uint8
videos `{camera: (B, T, 3, S, S)}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from robopolicy.atomic import atomic_file
from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import Interval, bootstrap_mean
from robopolicy.evaluation.video import BACKGROUND, CAPTION, GAP, TEXT, font
from robopolicy.optional import require
from robopolicy.worldmodel.action_following import HORIZONS, frame_psnr
from robopolicy.worldmodel.contract import Images, VideoWorldModel
from robopolicy.worldmodel.videos import VideoDataset

Array = NDArray[np.float64]
Encode = Callable[[Images], Tensor]
"""Function from frames `{camera: (B, 3, S, S)}` uint8 to feature maps `(B, Z, h, w)`."""

_WINDOW, _SIGMA = 11, 1.5  # window of SSIM [pixels]
_C1, _C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
_POOL = 2  # cells per side after pooling of the feature maps


def frame_ssim(predicted: Images, real: Images) -> Tensor:
    """Return the structural similarity `(B, T)` of frames of at least 11 pixels, averaged over colours and cameras."""
    return torch.stack([_ssim(predicted[camera], real[camera]) for camera in real]).mean(0)


def _ssim(predicted: Tensor, real: Tensor) -> Tensor:
    if min(real.shape[-2:]) < _WINDOW:
        raise UserError(f"SSIM needs images of at least {_WINDOW} pixels, got {tuple(real.shape[-2:])}.")
    offset = torch.arange(_WINDOW, dtype=torch.float64) - _WINDOW // 2
    line = (-0.5 * (offset / _SIGMA) ** 2).exp()
    window = (torch.outer(line, line) / line.sum() ** 2)[None, None]

    def local_mean(x: Tensor) -> Tensor:
        return F.conv2d(x, window)

    x, y = (video.cpu().double().flatten(0, 2)[:, None] for video in (predicted, real))  # (B * T * 3, 1, S, S)
    mean_x, mean_y = local_mean(x), local_mean(y)
    var_x, var_y = local_mean(x * x) - mean_x**2, local_mean(y * y) - mean_y**2
    covariance = local_mean(x * y) - mean_x * mean_y
    structure = (2 * covariance + _C2) / (var_x + var_y + _C2)
    similarity = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1) * structure
    return similarity.flatten(1).mean(1).unflatten(0, real.shape[:3]).mean(2)


class LPIPS:
    """Perceptual distance `(B, T)` of frames, 0 for equal ones: the linear weights of the package on an AlexNet."""

    def __init__(self, weights: str | Path) -> None:
        """Load the metric; `weights` is a local `model.safetensors` of torchvision's AlexNet, trained on ImageNet."""
        path = Path(weights)
        if not path.is_file():
            raise UserError(f"LPIPS needs the weights of an AlexNet as safetensors; there is none at {path}.")
        metric = require("lpips", "lpips").LPIPS(net="alex", pnet_rand=True, verbose=False)
        try:
            found = load_file(path)
            state = {key: found[_torchvision_name(key)] for key in metric.net.state_dict()}
            metric.net.load_state_dict(state, strict=True)
        except (KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{path} does not hold the weights of torchvision's AlexNet: {error}") from error
        self._metric = metric.eval()

    @torch.no_grad()
    def __call__(self, predicted: Images, real: Images) -> Tensor:
        """Return the distances."""
        views = []
        for camera, video in real.items():
            a, b = (x.cpu().flatten(0, 1).float() / 127.5 - 1 for x in (predicted[camera], video))
            views.append(self._metric(a, b).flatten().unflatten(0, video.shape[:2]))
        return torch.stack(views).mean(0)


def _torchvision_name(key: str) -> str:
    """Translate `slice2.3.weight` of the package to `features.3.weight` of torchvision."""
    return "features." + key.split(".", 1)[1]


def frechet_distance(first: ArrayLike, second: ArrayLike) -> float:
    """Return the Frechet distance of normal distributions fitted to features `(n, D)` and `(m, D)`, n, m >= 2.

    It decreases with the number of samples: only compare values of equal n and m.
    """
    a, b = (np.asarray(side, dtype=np.float64) for side in (first, second))
    if min(len(a), len(b)) < 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"Need at least two samples per side and equal feature sizes, got {a.shape} and {b.shape}.")
    covariances = [np.atleast_2d(np.cov(side, rowvar=False)) for side in (a, b)]
    values, vectors = np.linalg.eigh(covariances[0])
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    # This symmetric matrix has the eigenvalues of the product of both.
    product = np.linalg.eigvalsh(root @ covariances[1] @ root)
    spread = np.trace(covariances[0]) + np.trace(covariances[1]) - 2 * np.sqrt(np.maximum(product, 0)).sum()
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + max(spread, 0.0))


@torch.no_grad()
def clip_features(encode: Encode, images: Images) -> Array:
    """Return the features `(B, D)` of `FVD-own`: mean over time and mean change of pooled feature maps."""
    shape = next(iter(images.values())).shape[:2]
    maps = encode({camera: video.flatten(0, 1) for camera, video in images.items()})
    frames = F.adaptive_avg_pool2d(maps.float(), _POOL).flatten(1).unflatten(0, shape)  # (B, T, D / 2)
    change = frames.diff(dim=1).abs().mean(1) if shape[1] > 1 else torch.zeros_like(frames[:, 0])
    return torch.cat([frames.mean(1), change], 1).double().cpu().numpy()


@dataclass(frozen=True)
class VideoMetrics:
    """Metrics by horizon: per frame with intervals over the videos, and of the distribution of clips."""

    frames: Mapping[str, Mapping[int, Interval]]  # {metric: {horizon: mean over the videos}}
    sets: Mapping[int, float]  # {horizon: FVD-own of the clips up to it}
    features: str  # name of the encoder
    num_videos: int  # B

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and one row per horizon."""
        horizons = next(iter(self.frames.values()))
        own = [f"FVD-own ({self.features})"] if self.sets else []
        rows = [
            [
                str(horizon),
                *(f"{values[horizon]}" for values in self.frames.values()),
                *([f"{self.sets[horizon]:.3g}" if horizon in self.sets else "-"] if self.sets else []),
            ]
            for horizon in horizons
        ]
        return ["frames ahead", *self.frames, *own], rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        frames = {name: {str(h): value.to_dict() for h, value in row.items()} for name, row in self.frames.items()}
        sets = {str(horizon): value for horizon, value in self.sets.items()}
        return {"frames": frames, "fvd_own": sets, "features": self.features, "films": self.num_videos}


def compare_videos(
    predicted: Images,
    real: Images,
    *,
    encode: Encode | None = None,
    features: str = "",
    lpips: LPIPS | None = None,
    horizons: Sequence[int] = HORIZONS,
) -> VideoMetrics:
    """Compare predicted with recorded videos; frame t is t + 1 frames ahead.

    `real` has the same starts and actions. `encode`, e.g. `LatentWorldModel.encode`, is the encoder of `FVD-own` with
    the name `features`; it is skipped for None, like `lpips`. Horizons beyond the videos are skipped.
    """
    shapes = {camera: tuple(video.shape) for camera, video in real.items()}
    found = {camera: tuple(video.shape) for camera, video in predicted.items()}
    if shapes != found:
        raise UserError(f"Videos to compare must have equal cameras and shapes, got {found} and {shapes}.")
    count, length = next(iter(shapes.values()))[:2]
    kept = [horizon for horizon in horizons if horizon <= length]
    if not kept:
        raise UserError(f"The videos have {length} frames, but the shortest horizon is {min(horizons)}.")
    metrics: dict[str, Callable[[Images, Images], Tensor]] = {"PSNR [dB]": frame_psnr, "SSIM": frame_ssim}
    if lpips is not None:
        metrics["LPIPS"] = lpips
    frames: dict[str, dict[int, Interval]] = {}
    at = torch.tensor(kept) - 1
    a, b = ({camera: video[:, at] for camera, video in side.items()} for side in (predicted, real))
    for name, metric in metrics.items():
        values = metric(a, b)  # (B, horizons)
        frames[name] = {h: bootstrap_mean(values[:, i].numpy()) for i, h in enumerate(kept)}
    sets: dict[int, float] = {}
    if encode is not None and count > 1:
        for horizon in kept:
            sides = ({camera: video[:, :horizon] for camera, video in side.items()} for side in (predicted, real))
            sets[horizon] = frechet_distance(*(clip_features(encode, side) for side in sides))
    return VideoMetrics(frames, sets, features, count)


@torch.no_grad()
def contact_sheet(
    model: VideoWorldModel,
    videos: VideoDataset,
    path: Path,
    *,
    horizons: Sequence[int] = (1, 10, 20),
    typical: int = 2,
    worst: int = 2,
    windows: int = 64,
    side: int = 128,
    seed: int = 0,
) -> Path:
    """Write an image with one row per video: last context frame, then recorded and predicted frames by horizon.

    The rows are `typical` videos of median and `worst` of lowest PSNR [dB] at the last horizon, out of `windows` random
    ones, with one row per camera and images of `side` pixels. Horizons beyond the longest video are skipped.
    """
    horizons = [h for h in horizons if h < videos.max_actions]
    starts = videos.starts(max(horizons), windows, seed)
    clip, context = videos.clip(starts, max(horizons)), model.spec.context
    past = {camera: view[:, :context] for camera, view in clip.images.items()}
    state = model.reset(
        past, clip.proprio[:, :context], seeds=torch.arange(len(starts)), actions=clip.actions[:, : context - 1]
    )
    predicted = model.step(state, clip.actions[:, context - 1 :])[1].images
    end = {camera: view[:, -1:] for camera, view in predicted.items()}
    quality = frame_psnr(end, {camera: view[:, -1:] for camera, view in clip.images.items()})[:, 0]
    order = quality.argsort().tolist()
    middle = max((len(order) - typical) // 2, min(worst, len(order)))
    chosen = [("typical", row) for row in order[middle : middle + typical]] + [("worst", row) for row in order[:worst]]
    titles = ["last seen"] + [f"{kind} +{h}" for h in horizons for kind in ("real", "predicted")]
    lines = [(name, row, camera) for name, row in chosen for camera in model.spec.cameras]
    height = CAPTION + side + GAP
    canvas = Image.new("RGB", (GAP + len(titles) * (side + GAP), CAPTION + len(lines) * height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(titles):
        draw.text((GAP + column * (side + GAP), CAPTION / 2), title, TEXT, font(), anchor="lm")
    for line, (name, row, camera) in enumerate(lines):
        top = CAPTION + line * height
        title = f"{name}: {quality[row]:.1f} dB at +{max(horizons)}, camera {camera}"
        draw.text((GAP, top + CAPTION / 2), title, TEXT, font(), anchor="lm")
        real, generated = clip.images[camera][row], predicted[camera][row].cpu()
        pictures = [real[context - 1]]
        for h in horizons:
            pictures += [real[context - 1 + h], generated[h - 1]]
        for column, picture in enumerate(pictures):
            canvas.paste(_image(picture, side), (GAP + column * (side + GAP), top + CAPTION))
    with atomic_file(path) as temporary:
        canvas.save(temporary)
    return path


def _image(picture: Tensor, side: int) -> Image.Image:
    array = np.ascontiguousarray(picture.permute(1, 2, 0).numpy())
    return Image.fromarray(array).resize((side, side), Image.Resampling.NEAREST)
