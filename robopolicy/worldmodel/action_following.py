"""Does a world model do what it is told? The tests that every one must pass before it may judge a policy.

* **Shuffled actions**: predictions with the true actions must be closer to what was filmed than predictions with those
  of other films, or with none (PSNR gap [dB], by horizon).
* **Direction sweep**: from one frame, each action dimension played at its upper and at its lower end must move what it
  moves in the data, and that way. Read off the predicted state vector, where there is one.
* **Failures seen**: a model that was trained on successes alone has never seen a task go wrong, and shows success
  whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from robopolicy.constraints import Finite, Fraction, Validated
from robopolicy.errors import UserError
from robopolicy.worldmodel.contract import Images, VideoWorldModel
from robopolicy.worldmodel.videos import VideoDataset

HORIZONS = (1, 5, 10, 20, 40)
MODES = ("true", "shuffled", "zero")
_ANSWERS = 0.3  # least change of the state vector with an action, both in standard deviations, that is its effect


@dataclass(frozen=True)
class GateConfig(Validated):
    """What a world model must achieve."""

    gap_db: Finite = 0.5  # least gap between true and shuffled actions, and true and no actions, one frame ahead [dB]
    direction: Fraction = 0.9  # least share of frames from which every effective action dimension moves things its way
    failures: Fraction = 0.05  # least share of failed episodes in the training data, where the task has success


@dataclass(frozen=True)
class ActionFollowingReport:
    """How predictions depend on actions."""

    psnr: dict[str, dict[int, float]]  # {true, shuffled, zero: {horizon: mean [dB]}}
    directions: dict[str, float]  # {action name: share of frames}; only those with an effect in the data
    films: int  # windows compared

    def gap(self, other: str = "shuffled", horizon: int = 1) -> float:
        """PSNR of true actions minus that of `other` [dB]."""
        return self.psnr["true"][horizon] - self.psnr[other][horizon]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, with horizons as strings."""
        psnr = {mode: {str(horizon): value for horizon, value in row.items()} for mode, row in self.psnr.items()}
        return {**asdict(self), "psnr": psnr}


@dataclass(frozen=True)
class Verdict:
    """Whether a world model may judge policies."""

    passed: bool
    reasons: tuple[str, ...]  # one sentence per failed test

    def require(self, what: str) -> None:
        """Refuse to go on with the model called `what` where it failed.

        Raises:
            UserError: Says which tests it failed.
        """
        if not self.passed:
            raise UserError(f"{what} must not judge policies: {' '.join(self.reasons)}")


@torch.no_grad()
def measure_action_following(
    model: VideoWorldModel, films: VideoDataset, *, horizon: int = 20, windows: int = 64, seed: int = 0
) -> ActionFollowingReport:
    """Compare predictions with true, shuffled and zero actions, and sweep the actions.

    Args:
        model: The world model.
        films: Films that it was not trained on.
        horizon: Frames to predict at most; fewer where no film is as long.
        windows: Films to continue, at least 2.
        seed: Of the choice.
    """
    horizon = max(1, min(horizon, films.longest - 1))
    starts = films.starts(horizon, windows, seed)
    if len(starts) < 2:
        raise UserError(f"Comparing actions needs two windows of {horizon} frames, found {len(starts)}; add films.")
    clip, context = films.clip(starts, horizon), model.spec.context
    actions = clip.actions[:, context - 1 :]
    told = {"true": actions, "shuffled": actions.roll(len(starts) // 2, 0), "zero": torch.zeros_like(actions)}
    state = _begin(model, clip.images, clip.proprio, clip.actions)
    psnr: dict[str, dict[int, float]] = {}
    for mode in MODES:
        frames = model.step(state, told[mode])[1].images
        real = {camera: value[:, context:] for camera, value in clip.images.items()}
        values = frame_psnr(frames, real).mean(0)
        psnr[mode] = {h: float(values[h - 1]) for h in HORIZONS if h <= horizon}
    return ActionFollowingReport(psnr, action_sweep(model, films, windows=windows, seed=seed), len(starts))


def frame_psnr(predicted: Images, real: Images) -> Tensor:
    """PSNR `(B, T)` [dB] of uint8 films `{camera: (B, T, 3, S, S)}`, of all cameras together."""
    errors = [
        (predicted[camera].cpu().float() - real[camera].cpu().float()).pow(2).flatten(2).mean(2) for camera in real
    ]
    return 10 * torch.log10(255.0**2 / torch.stack(errors).mean(0).clamp(min=1e-2))


@torch.no_grad()
def action_sweep(
    model: VideoWorldModel, films: VideoDataset, *, steps: int = 3, windows: int = 32, seed: int = 0
) -> dict[str, float]:
    """Share of frames from which each action dimension moves its entry of the state vector the way it does in the data.

    The entry of a dimension is that which changes most with it over `steps` frames while the others stay, in the data;
    dimensions without one, and worlds without a state vector, are left out.
    """
    moved = _moved(films, steps)
    starts = films.starts(1, windows, seed)
    clip = films.clip(starts, 1)
    keep = films.spec.context
    past = {camera: value[:, :keep] for camera, value in clip.images.items()}
    state = _begin(model, past, clip.proprio[:, :keep], clip.actions)
    middle = films.actions.mean(0)
    names = films.spec.action_names or tuple(f"action {index}" for index in range(films.spec.action_dim))
    shares: dict[str, float] = {}
    for dimension, (entry, sign) in moved.items():
        ends: list[Tensor] = []
        for quantile in (0.95, 0.05):
            action = middle.clone()
            action[dimension] = films.actions[:, dimension].quantile(quantile)
            played = action.expand(len(starts), steps, -1)
            ends.append(model.step(state, played)[1].proprio[:, -1, entry])
        shares[names[dimension]] = float(((ends[0] - ends[1]) * sign > 0).float().mean())
    return shares


def judge(following: ActionFollowingReport, *, failures: float | None, config: GateConfig | None = None) -> Verdict:
    """Pass or refuse a model.

    Args:
        following: Its predictions.
        failures: Share of failed episodes in its training data; None where the task has no success.
        config: What it must achieve.
    """
    config = config or GateConfig()
    reasons: list[str] = []
    for other in ("shuffled", "zero"):
        gap = following.gap(other)
        if not gap >= config.gap_db:
            reasons.append(
                f"It ignores actions: {other} ones cost {gap:.2f} dB one frame ahead, not {config.gap_db:g}."
            )
    for name, share in following.directions.items():
        if share < config.direction:
            reasons.append(f"'{name}' moves things the wrong way from {1 - share:.0%} of the frames.")
    if failures is not None and failures < config.failures:
        reasons.append(
            f"It was trained on successes: {failures:.0%} of its episodes failed, not {config.failures:.0%}."
        )
    return Verdict(not reasons, tuple(reasons))


def failure_share(films: VideoDataset) -> float | None:
    """Share of failed episodes; None where the data do not speak of success."""
    return float((~films.episodes.success).mean()) if "success" in films.episodes.arrays else None


def _begin(model: VideoWorldModel, images: Images, proprio: Tensor, actions: Tensor) -> Any:
    keep = model.spec.context
    past = {camera: value[:, :keep] for camera, value in images.items()}
    return model.reset(past, proprio[:, :keep], seeds=torch.arange(len(proprio)), actions=actions[:, : keep - 1])


def _moved(films: VideoDataset, steps: int) -> dict[int, tuple[int, float]]:
    """{action dimension: (entry of the state vector, sign of its effect)} in the data."""
    if not films.spec.proprio_dim:
        return {}
    starts = films.starts(steps, 5000)
    frames, actions, _ = films.window(starts, steps)
    context = films.spec.context
    change = films.proprio[frames[:, -1]] - films.proprio[frames[:, context - 1]]
    told = actions[:, context - 1 :].mean(1)
    scores = effects(told, change)  # (A, P)
    found: dict[int, tuple[int, float]] = {}
    for dimension, row in enumerate(scores):
        entry = int(row.abs().argmax())
        if row[entry].abs() >= _ANSWERS:
            found[dimension] = (entry, float(row[entry].sign()))
    return found


def effects(actions: Tensor, change: Tensor) -> Tensor:
    """Slopes `(A, P)` of `change` `(N, P)` on all of `actions` `(N, A)` at once, standardised; 0 where one is constant.

    One by one they would mislead: a policy that closes its gripper when it lifts makes closing look like lifting.
    """
    scales = [value.std(0) for value in (actions, change)]
    x, y = ((v - v.mean(0)) / s.clamp(min=1e-9) for v, s in zip((actions, change), scales, strict=True))
    slopes = torch.linalg.lstsq(x, y, driver="gelsd").solution  # of least norm where columns depend on each other
    return slopes * ((scales[0] > 1e-9)[:, None] & (scales[1] > 1e-9))


def table(following: ActionFollowingReport) -> tuple[Sequence[str], list[list[str]]]:
    """Header and rows of PSNR [dB] by horizon."""
    horizons = sorted(following.psnr["true"])
    rows = [[mode, *(f"{following.psnr[mode][h]:.1f}" for h in horizons)] for mode in MODES]
    return ["actions", *(f"h={h}" for h in horizons)], rows
