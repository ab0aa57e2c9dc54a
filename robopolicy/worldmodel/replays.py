"""Replays of recorded actions in a world model, compared with what was recorded.

A replay starts at the first frame of an episode and executes its actions. Its errors come from the model and the
success detector alone: no policy reacts to predicted frames.

Calibration moves the decision of the success head of a model to the threshold that separates successful from failed
episodes best, on recorded frames and in replays. The head is trained on single recorded frames; an episode fails by all
of its frames, and errors accumulate before a replay reaches success. Errors that hide success are beyond calibration.

The test of a model needs a threshold that the tested replays did not set: each half of the episodes is tested at the
threshold of the other half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.worldmodel.base import DEVICE_ROWS, LatentVideoModel
from robopolicy.worldmodel.success_detectors.clips import best_threshold
from robopolicy.worldmodel.videos import VideoDataset, alternating_half

_EPS = 1e-6  # distance of probabilities from 0 and 1 before the logit


@dataclass(frozen=True)
class Replays:
    """Outcomes of E replays."""

    recorded: Tensor  # (E,) bool, success of the recorded episode
    logits: Tensor  # (E,) largest logit of success on predicted frames
    seen: Tensor  # (E,) largest logit of success on the recorded frames
    errors: Tensor  # (T,) root mean squared error of state vectors by frames ahead, in standard deviations of the data

    @property
    def bias(self) -> float:
        """Offset of the logits at which they separate the outcomes best (Youden); 0 without both outcomes."""
        values, outcomes = torch.cat([self.logits, self.seen]).double().sigmoid(), self.recorded.repeat(2)
        threshold = best_threshold(values.numpy(), outcomes.numpy())
        return -float(torch.tensor(threshold, dtype=torch.float64).logit())

    def cross_calibrated(self) -> Replays:
        """Return the replays with the offset of each half of the episodes added to the logits of the other half.

        A half without both outcomes sets no offset; that takes fewer than two successes or two failures.
        """
        half = torch.from_numpy(alternating_half(self.recorded.numpy()))
        offset = torch.where(half, self._subset(~half).bias, self._subset(half).bias)
        return replace(self, logits=self.logits + offset, seen=self.seen + offset)

    def _subset(self, chosen: Tensor) -> Replays:
        return replace(self, recorded=self.recorded[chosen], logits=self.logits[chosen], seen=self.seen[chosen])

    def rates(self) -> dict[str, float]:
        """Success rates: recorded, detected in recorded frames, and replayed; `agreement` is per replayed episode."""
        found = self.logits >= 0
        values = {"recorded": self.recorded, "detected": self.seen >= 0, "replayed": found}
        rates = {name: float(value.float().mean()) for name, value in values.items()}
        return rates | {"agreement": float((found == self.recorded).float().mean())}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**self.rates(), "state_error": {str(h): float(self.errors[h - 1]) for h in self.horizons()}}

    def horizons(self) -> list[int]:
        """Return the frames ahead at which errors are listed."""
        return [horizon for horizon in (1, 5, 10, 20, 40) if horizon <= len(self.errors)]


@torch.no_grad()
def replay(model: LatentVideoModel, videos: VideoDataset, episodes: int = 128) -> Replays:
    """Replay `episodes` of `videos`, evenly spread over them, and compare success and state vectors."""
    starts, ends = (torch.from_numpy(part) for part in (videos.episodes.starts, videos.episodes.ends))
    chosen = torch.linspace(0, len(starts) - 1, min(episodes, len(starts))).round().long()
    starts, lengths = starts[chosen], (ends - starts)[chosen]
    size = model.config.rows if model.device.type == "cpu" else DEVICE_ROWS
    parts = [_replay(model, videos, starts[rows], lengths[rows]) for rows in torch.arange(len(starts)).split(size)]
    logits, seen = (torch.cat([part[index] for part in parts]) for index in (0, 1))
    longest = int(lengths.max()) - 1
    squares, count = torch.zeros(longest), torch.zeros(longest)
    for _, _, error, real in parts:
        squares[: len(error)] += error.sum(1)
        count[: len(real)] += real.sum(1)
    success = torch.from_numpy(videos.episodes.success)[chosen]
    return Replays(success, logits, seen, (squares / count).sqrt())


def calibrate_success(model: LatentVideoModel, videos: VideoDataset, episodes: int = 128) -> Replays:
    """Set the offset of the success head by replays of `videos`, and return the replays for the test of the model.

    The offset of the model comes from all replays. Those returned are cross-calibrated, so that no replay is tested
    at a threshold that it helped to set.
    """
    model.success_bias.zero_()  # probabilities of an earlier offset may be saturated
    replays = replay(model, videos, episodes)
    model.success_bias.fill_(replays.bias)
    return replays.cross_calibrated()


def _replay(
    model: LatentVideoModel, videos: VideoDataset, starts: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the largest logits `(B,)` on predicted and recorded frames, squared state errors and a mask `(T, B)`."""
    window = videos.context(starts)
    state = model.reset(window.images, window.proprio, seeds=torch.arange(len(starts)))
    found, seen = (torch.full((len(starts),), -torch.inf) for _ in range(2))
    errors, masks = [], []
    for step in range(int(lengths.max()) - 1):
        real = step + 1 < lengths
        frames = starts + torch.minimum(torch.tensor(step), lengths - 1)
        state, predicted = model.step(state, videos.actions[frames][:, None])
        after = torch.minimum(frames + 1, starts + lengths - 1)
        recorded = {camera: value[after][:, None] for camera, value in videos.images.items()}
        for best, images, proprio in (
            (found, predicted.images, predicted.proprio),
            (seen, recorded, videos.proprio[after][:, None]),
        ):
            logit = model.judge(images, proprio).success.cpu().logit(_EPS)
            best.copy_(torch.where(real, torch.maximum(best, logit), best))
        error = (predicted.proprio[:, 0].cpu() - videos.proprio[after]) / model.proprio_std.cpu()
        errors.append(error.pow(2).sum(1).div(max(1, videos.spec.proprio_dim)) * real)
        masks.append(real)
    return found, seen, torch.stack(errors), torch.stack(masks)
