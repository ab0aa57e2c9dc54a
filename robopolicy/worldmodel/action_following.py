"""Action-following tests that a world model must pass before it may evaluate a policy.

* **Shuffled actions**: predictions with the true actions must be closer to the recorded frames than predictions with
  actions of other videos or zero actions (PSNR gap [dB], by horizon).
* **Direction sweep**: from one frame, the upper and the lower end of each action dimension must change the state vector
  in the direction that the data show. Skipped for worlds without a state vector.
* **Failures in the data**: a model that was trained only on successes has no examples of failures and predicts success
  for any actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import Finite, Fraction, Validated
from robopolicy.errors import UserError
from robopolicy.worldmodel.contract import Images, VideoWorldModel
from robopolicy.worldmodel.videos import VideoDataset

HORIZONS = (1, 5, 10, 20, 40)
MODES = ("true", "shuffled", "zero")
_COMPARABLE = 0.8  # of the largest slope: entries whose slopes do not tell them apart
_MIN_EFFECT = 0.3  # least slope of the state vector on an action, both standardised, that counts as an effect


@dataclass(frozen=True)
class GateConfig(Validated):
    """Thresholds of the action-following tests."""

    gap_db: Finite = 0.5  # least gap between true and shuffled, and true and zero actions, one frame ahead [dB]
    direction: Fraction = 0.9  # least fraction of frames with the right direction, for every effective action dimension
    failures: Fraction = 0.05  # least fraction of failed episodes in the training data, where the task defines success


@dataclass(frozen=True)
class ActionFollowingReport:
    """Dependence of predictions on actions."""

    psnr: dict[str, dict[int, float]]  # {true, shuffled, zero: {horizon: mean [dB]}}
    directions: dict[str, float]  # {action name: fraction of frames}; only those with an effect in the data
    num_windows: int  # windows compared

    def gap(self, other: str = "shuffled", horizon: int = 1) -> float:
        """Difference of the PSNR with true actions and with `other` actions [dB]."""
        return self.psnr["true"][horizon] - self.psnr[other][horizon]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, with horizons as strings."""
        psnr = {mode: {str(horizon): value for horizon, value in row.items()} for mode, row in self.psnr.items()}
        return {"psnr": psnr, "directions": dict(self.directions), "films": self.num_windows}


@dataclass(frozen=True)
class Verdict:
    """Result of the tests."""

    passed: bool
    reasons: tuple[str, ...]  # one sentence per failed test

    def require(self, what: str) -> None:
        """Raise a UserError with the failed tests; `what` is the name of the model in the message."""
        if not self.passed:
            more = f" ({len(self.reasons) - 1} more reasons: 'robopolicy worldmodel eval')" if self.reasons[1:] else ""
            raise UserError(f"{what} must not evaluate policies: {self.reasons[0]}{more}")


@torch.no_grad()
def measure_action_following(
    model: VideoWorldModel, videos: VideoDataset, *, horizon: int = 20, windows: int = 64, seed: int = 0
) -> ActionFollowingReport:
    """Compare predictions with true, shuffled and zero actions, and sweep the actions.

    `videos` must be held out from training. At least two `windows` of `horizon` frames are compared; the horizon is
    limited by the longest video.
    """
    horizon = max(1, min(horizon, videos.max_actions - 1))
    starts = videos.starts(horizon, windows, seed)
    if len(starts) < 2:
        raise UserError(f"Comparing actions needs two windows of {horizon} frames, found {len(starts)}; add videos.")
    clip, context = videos.clip(starts, horizon), model.spec.context
    actions = clip.actions[:, context - 1 :]
    modes = {"true": actions, "shuffled": actions.roll(len(starts) // 2, 0), "zero": torch.zeros_like(actions)}
    state = _reset(model, clip.images, clip.proprio, clip.actions)
    psnr: dict[str, dict[int, float]] = {}
    for mode in MODES:
        frames = model.step(state, modes[mode])[1].images
        real = {camera: value[:, context:] for camera, value in clip.images.items()}
        values = frame_psnr(frames, real).mean(0)
        psnr[mode] = {h: float(values[h - 1]) for h in HORIZONS if h <= horizon}
    return ActionFollowingReport(psnr, action_sweep(model, videos, windows=windows, seed=seed), len(starts))


def frame_psnr(predicted: Images, real: Images) -> Tensor:
    """Return the PSNR `(B, T)` [dB] of uint8 videos `{camera: (B, T, 3, S, S)}` over all cameras."""
    errors = [
        (predicted[camera].cpu().float() - real[camera].cpu().float()).pow(2).flatten(2).mean(2) for camera in real
    ]
    return 10 * torch.log10(255.0**2 / torch.stack(errors).mean(0).clamp(min=1e-2))


@torch.no_grad()
def action_sweep(
    model: VideoWorldModel, videos: VideoDataset, *, steps: int = 3, windows: int = 32, seed: int = 0
) -> dict[str, float]:
    """Return the fraction of frames from which each action dimension has the same effect as in the data.

    The effect of a dimension is on the entry that changes most with it over `steps` frames, with the other dimensions
    held constant; among comparable entries, on the one that follows it most often. Dimensions without an effect and
    worlds without a state vector are left out.
    """
    effects = _measured_effects(videos, steps)
    starts = videos.starts(1, windows, seed)
    clip = videos.clip(starts, 1)
    state = _reset(model, clip.images, clip.proprio, clip.actions)
    middle = videos.actions.mean(0)
    names = videos.spec.action_names or tuple(f"action {index}" for index in range(videos.spec.action_dim))
    shares: dict[str, float] = {}
    for dimension, (entry, sign) in effects.items():
        ends: list[Tensor] = []
        for quantile in (0.95, 0.05):
            action = middle.clone()
            action[dimension] = videos.actions[:, dimension].quantile(quantile)
            ends.append(model.step(state, action.expand(len(starts), steps, -1))[1].proprio[:, -1, entry])
        shares[names[dimension]] = float(((ends[0] - ends[1]) * sign > 0).float().mean())
    return shares


def check_gates(
    following: ActionFollowingReport,
    *,
    failures: float | None,
    further: Sequence[str] = (),
    config: GateConfig | None = None,
) -> Verdict:
    """Apply the thresholds.

    `failures` is the fraction of failed training episodes, None for tasks without success; `further` are the reasons of
    other failed tests.
    """
    config = config or GateConfig()
    reasons = list(further)
    for other in ("shuffled", "zero"):
        gap = following.gap(other)
        if not gap >= config.gap_db:
            reasons.append(
                f"It ignores actions: {other} actions cost {gap:.2f} dB one frame ahead, below {config.gap_db:g}."
            )
    for name, share in following.directions.items():
        if share < config.direction:
            reasons.append(f"'{name}' has the wrong direction from {1 - share:.0%} of the frames.")
    if failures is not None and failures < config.failures:
        reasons.append(
            f"It was trained on successes: {failures:.0%} of its episodes failed, below {config.failures:.0%}."
        )
    return Verdict(not reasons, tuple(reasons))


def failure_fraction(videos: VideoDataset) -> float | None:
    """Return the fraction of failed episodes; None where success is not recorded."""
    return float((~videos.episodes.success).mean()) if "success" in videos.episodes.arrays else None


def _reset(model: VideoWorldModel, images: Images, proprio: Tensor, actions: Tensor) -> Any:
    keep = model.spec.context
    past = {camera: value[:, :keep] for camera, value in images.items()}
    return model.reset(past, proprio[:, :keep], seeds=torch.arange(len(proprio)), actions=actions[:, : keep - 1])


def _measured_effects(videos: VideoDataset, steps: int) -> dict[int, tuple[int, float]]:
    """Return {action dimension: (entry of the state vector, sign of the effect)} in the data."""
    if not videos.spec.proprio_dim:
        return {}
    starts = videos.starts(steps, 5000)
    frames, actions, _ = videos.window(starts, steps)
    context = videos.spec.context
    change = videos.proprio[frames[:, -1]] - videos.proprio[frames[:, context - 1]]
    taken = actions[:, context - 1 :].mean(1)
    found: dict[int, tuple[int, float]] = {}
    for dimension, row in enumerate(standardized_slopes(taken, change)):
        if row.abs().max() >= _MIN_EFFECT:
            entry = steadiest(row, taken[:, dimension], change)
            found[dimension] = (entry, float(row[entry].sign()))
    return found


def steadiest(slopes: Tensor, actions: Tensor, change: Tensor) -> int:
    """Return the entry that follows `actions` `(N,)` most often, among those with comparable `slopes` `(P,)`.

    Raising the tool changes its height always, but its height above an object only while it does not hold that object.
    """
    candidates = (slopes.abs() >= _COMPARABLE * slopes.abs().max()).nonzero().flatten()
    pushed = (actions - actions.mean())[:, None] * slopes[candidates]
    follows = (pushed * (change - change.mean(0))[:, candidates] > 0).float().mean(0)
    return int(candidates[follows.argmax()])


def standardized_slopes(actions: Tensor, change: Tensor) -> Tensor:
    """Return the slopes `(A, P)` of `change` `(N, P)` on `actions` `(N, A)` in one regression; 0 for a constant side.

    Separate regressions would mislead: a policy that closes its gripper when it lifts makes closing look like lifting.
    """
    scales = [value.std(0) for value in (actions, change)]
    x, y = ((v - v.mean(0)) / s.clamp(min=1e-9) for v, s in zip((actions, change), scales, strict=True))
    slopes = torch.linalg.lstsq(x, y, driver="gelsd").solution  # of least norm where columns depend on each other
    return slopes * ((scales[0] > 1e-9)[:, None] & (scales[1] > 1e-9))


def table(following: ActionFollowingReport) -> tuple[Sequence[str], list[list[str]]]:
    """Return the header and rows of a table of PSNR [dB] by horizon."""
    horizons = sorted(following.psnr["true"])
    rows = [[mode, *(f"{following.psnr[mode][h]:.1f}" for h in horizons)] for mode in MODES]
    return ["actions", *(f"h={h}" for h in horizons)], rows
