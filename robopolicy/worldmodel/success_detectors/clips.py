"""Shared parts of the trained success detectors: training examples, network ensembles, training and calibration.

Predicted frames are slightly blurred: `Examples.from_videos` takes a function `reconstruct` (encode and decode, or
frames that the world model generated), and half of the training frames are then reconstructed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from robopolicy.constraints import FractionBelowOne, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.nets.mlp import MLP
from robopolicy.nets.vision import CameraNet, VisionConfig
from robopolicy.worldmodel.contract import Images
from robopolicy.worldmodel.videos import VideoDataset

Reconstruct = Callable[[Images], Images]
"""Function of frames `{camera: (B, 3, S, S)}` uint8 that returns them as a world model predicts them."""
_BATCH = 256


@dataclass(frozen=True)
class JudgeConfig(Validated):
    """Architecture of a trained success detector."""

    members: PositiveInt = 3  # M, networks; their disagreement is the uncertainty
    frames: PositiveInt = 1  # last frames of a clip that are used
    hidden: tuple[PositiveInt, ...] = (128,)
    vision: VisionConfig = field(default_factory=lambda: VisionConfig(widths=(16, 32, 64), keypoints=16, crop=1.0))
    abstain: FractionBelowOne = 0.05  # fraction of the held-out frames that may be uncertain


@dataclass(frozen=True)
class FitConfig(Validated):
    """Training of a success detector."""

    steps: PositiveInt = 1_500  # gradient steps
    batch_size: PositiveInt = 64
    learning_rate: Positive = 1e-3
    seed: NonNegativeInt = 0
    device: str = "cpu"


class Examples:
    """F labelled frames with the clips that lead to them, as recorded and as reconstructed by a world model."""

    def __init__(self, videos: VideoDataset, views: list[Images]) -> None:
        """Use `Examples.from_videos`."""
        self.videos, self.views = videos, views  # views: {camera: (F, 3, S, S)} uint8, the recorded one first

    @classmethod
    def from_videos(cls, videos: VideoDataset, reconstruct: Reconstruct | None = None) -> Examples:
        """Use the frames of `videos`, and also their reconstructions if `reconstruct` is given."""
        views = [videos.images]
        if reconstruct is not None:
            views.append(_reconstructed(videos.images, reconstruct))
        return cls(videos, views)

    def __len__(self) -> int:
        return len(self.videos)

    def clips(self, frames: Tensor, length: int, view: int = 0) -> Images:
        """Return clips `{camera: (B, length, 3, S, S)}` that end at `frames` `(B,)`, padded with first frames."""
        back = torch.arange(1 - length, 1)
        index = torch.maximum(frames[:, None] + back, self.videos.first[frames][:, None])
        return {camera: pictures[index] for camera, pictures in self.views[view].items()}

    def sample(self, frames: Tensor, length: int, generator: torch.Generator) -> Images:
        """Return clips, each row from a random view."""
        if len(self.views) == 1:
            return self.clips(frames, length)
        view = torch.randint(len(self.views), (len(frames),), generator=generator)
        parts = [self.clips(frames, length, number) for number in range(len(self.views))]
        return {
            camera: torch.stack([part[camera] for part in parts])[view, torch.arange(len(frames))]
            for camera in parts[0]
        }

    def batches(self, length: int, view: int = 0) -> Iterator[tuple[Tensor, Images]]:
        """Iterate over batches of all frames `(B,)` and their clips."""
        for frames in torch.arange(len(self)).split(_BATCH):
            yield frames, self.clips(frames, length, view)


class ClipNet(nn.Module):
    """Network from the last frames of clips `{camera: (B, T, 3, S, S)}` to `(B, outputs)`."""

    def __init__(self, config: JudgeConfig, cameras: Mapping[str, int], outputs: int) -> None:
        super().__init__()
        self.frames = config.frames
        self.cameras = nn.ModuleDict(
            {name: CameraNet((3, size, size), config.vision) for name, size in sorted(cameras.items())}
        )
        width = sum(net.feature_dim for net in self.cameras.values())  # type: ignore[misc]
        self.head = MLP(config.frames * width, config.hidden, outputs, activation="relu")

    def forward(self, images: Mapping[str, Tensor]) -> Tensor:
        """Map the last frames, padded with the first one, to the outputs."""
        features = []
        for name, net in self.cameras.items():
            clip = images[name]
            length = clip.shape[1]
            last = clip[:, [max(length - self.frames + k, 0) for k in range(self.frames)]]
            features.append(net(last.flatten(0, 1)).unflatten(0, last.shape[:2]).flatten(1))
        return self.head(torch.cat(features, 1))


class ClipEnsemble(nn.Module):
    """M networks with different initial weights: clips -> `(M, B, outputs)`."""

    def __init__(self, config: JudgeConfig, cameras: Mapping[str, int], outputs: int) -> None:
        super().__init__()
        self.config, self.sizes, self.outputs = config, dict(cameras), outputs
        self.members = nn.ModuleList(ClipNet(config, cameras, outputs) for _ in range(config.members))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def forward(self, images: Mapping[str, Tensor]) -> Tensor:
        """Evaluate all members on the same clips."""
        return torch.stack([member(images) for member in self.members])

    @torch.no_grad()
    def predict(self, images: Mapping[str, Tensor]) -> Tensor:
        """Check the clips, which may be on any device, and evaluate all members without gradients."""
        check_clips(self.sizes, images)
        return self({name: images[name].to(self.device) for name in self.sizes})

    @torch.no_grad()
    def predict_all(self, examples: Examples, view: int = 0) -> Tensor:
        """Return outputs `(M, F, outputs)` for all frames."""
        parts = [self.predict(clips) for _, clips in examples.batches(self.config.frames, view)]
        return torch.cat(parts, 1).cpu()


def check_clips(sizes: Mapping[str, int], images: Mapping[str, Tensor]) -> None:
    """Raise a UserError for clips of other cameras or sizes."""
    for name, size in sizes.items():
        found = tuple(images[name].shape[-2:]) if name in images else "none"
        if found != (size, size):
            raise UserError(f"The detector needs camera '{name}' with {size}x{size} pixels, got {found}.")


def fit_ensemble(
    config: JudgeConfig,
    fit: FitConfig,
    examples: Examples,
    outputs: int,
    draw: Callable[[torch.Generator], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> ClipEnsemble:
    """Train an ensemble; every member has its own batches.

    `draw` samples the indices `(B,)` of a batch of frames; `loss` receives outputs `(B, outputs)` and these indices.
    """
    with torch.random.fork_rng():
        torch.manual_seed(fit.seed)
        sizes = {camera: pictures.shape[-1] for camera, pictures in examples.videos.images.items()}
        ensemble = ClipEnsemble(config, sizes, outputs).to(fit.device)
    optimiser = torch.optim.AdamW(ensemble.parameters(), fit.learning_rate)
    generator = torch.Generator().manual_seed(fit.seed)
    for step in range(fit.steps):
        for group in optimiser.param_groups:
            group["lr"] = fit.learning_rate * (1 - step / fit.steps)
        total = torch.zeros((), device=fit.device)
        for member in ensemble.members:
            frames = draw(generator)
            clips = examples.sample(frames, config.frames, generator)
            total = total + loss(member({k: v.to(fit.device) for k, v in clips.items()}), frames)
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    return ensemble.eval()


@torch.no_grad()
def _reconstructed(images: Images, reconstruct: Reconstruct) -> Images:
    count = len(next(iter(images.values())))
    parts = [
        reconstruct({camera: pictures[rows] for camera, pictures in images.items()})
        for rows in torch.arange(count).split(_BATCH)
    ]
    return {camera: torch.cat([part[camera].cpu() for part in parts]) for camera in images}


Array = NDArray[np.float64]
_LOG_TEMPERATURES = (-4.0, 4.0)  # search range
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class Reliability:
    """Reliability curve over bins of equal width, without empty bins."""

    confidence: Array  # (b,) mean probability
    frequency: Array  # (b,) fraction of positive labels
    count: NDArray[np.int64]  # (b,)

    @property
    def error(self) -> float:
        """Expected calibration error: mean absolute difference, weighted by count."""
        return float(np.abs(self.confidence - self.frequency) @ self.count / self.count.sum())


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """Fit the temperature that maximises the likelihood of `labels` `(n,)` given `logits` `(n,)` (Guo et al. 2017).

    The likelihood has one maximum, found by golden-section search. Labels are smoothed by one observation of either
    class (Platt 1999), because a detector without errors would otherwise get an infinite confidence.
    """
    z, y = np.asarray(logits, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    wins, losses = y.sum(), (1 - y).sum()
    y = np.where(y > 0.5, (wins + 1) / (wins + 2), 1 / (losses + 2))

    def loss(log_temperature: float) -> float:
        scaled = z * np.exp(-log_temperature)
        return float((np.logaddexp(0, scaled) - y * scaled).mean())

    low, high = _LOG_TEMPERATURES
    while high - low > 1e-4:
        a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, b) if loss(a) < loss(b) else (a, high)
    return float(np.exp((low + high) / 2))


def reliability(probabilities: ArrayLike, labels: ArrayLike, bins: int = 10) -> Reliability:
    """Compute the reliability curve of `probabilities` `(n,)` for `labels` `(n,)`."""
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.float64)
    place = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(place, minlength=bins)
    filled = count > 0
    sums = (np.bincount(place, weights, minlength=bins)[filled] for weights in (p, y))
    confidence, frequency = (total / count[filled] for total in sums)
    return Reliability(confidence, frequency, count[filled])


def best_threshold(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Return the threshold with the largest sum of sensitivity and specificity (Youden); 0.5 with a single class.

    It is halfway between the two probabilities that it separates.
    """
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.bool_)
    if y.all() or not y.any():
        return 0.5
    values = np.unique(p)
    candidates = np.concatenate([[values[0] / 2], (values[1:] + values[:-1]) / 2, [(1 + values[-1]) / 2]])
    positives, negatives = np.sort(p[y]), np.sort(p[~y])
    missed = np.searchsorted(positives, candidates) / len(positives)
    kept = np.searchsorted(negatives, candidates) / len(negatives)
    return float(candidates[np.argmax(kept - missed)])
