"""Confusion matrices of success detectors, and success rates corrected for their errors.

A detector has a sensitivity (fraction of successes it detects) and a specificity (fraction of failures it detects). The
Rogan-Gladen estimator computes the true success rate from them and the detected rate. Measure both on recorded and on
reconstructed frames; use the latter to correct evaluations in a world model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from robopolicy.evaluation.intervals import Interval, wilson
from robopolicy.worldmodel.contract import SuccessDetector
from robopolicy.worldmodel.success_detectors.clips import Examples

Array = NDArray[np.float64]
VIEWS = ("as filmed", "as reconstructed")


@dataclass(frozen=True)
class Confusion:
    """Counts of predicted and true outcomes of clips, without abstentions."""

    true_positives: int
    false_negatives: int
    false_positives: int
    true_negatives: int
    abstained: int = 0

    @classmethod
    def from_outcomes(cls, predicted: ArrayLike, actual: ArrayLike, uncertain: ArrayLike | None = None) -> Confusion:
        """Count outcomes `(n,)`; `uncertain` clips `(n,)` only count as abstentions."""
        guess, truth = np.asarray(predicted, np.bool_), np.asarray(actual, np.bool_)
        kept = np.ones(guess.shape, np.bool_) if uncertain is None else ~np.asarray(uncertain, np.bool_)

        def count(true: bool, judged: bool) -> int:
            return int((kept & (truth == true) & (guess == judged)).sum())

        return cls(
            true_positives=count(True, True),
            false_negatives=count(True, False),
            false_positives=count(False, True),
            true_negatives=count(False, False),
            abstained=int((~kept).sum()),
        )

    @property
    def sensitivity(self) -> Interval | None:
        """Fraction of detected successes; None without successes."""
        n = self.true_positives + self.false_negatives
        return wilson(self.true_positives, n) if n else None

    @property
    def specificity(self) -> Interval | None:
        """Fraction of detected failures; None without failures."""
        n = self.true_negatives + self.false_positives
        return wilson(self.true_negatives, n) if n else None

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and rows of the confusion matrix."""
        rows = [
            ["success", str(self.true_positives), str(self.false_negatives), _show(self.sensitivity)],
            ["failure", str(self.false_positives), str(self.true_negatives), _show(self.specificity)],
        ]
        return ["true", "detected success", "detected failure", "correct"], rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        sides = {name: getattr(self, name) for name in ("sensitivity", "specificity")}
        return asdict(self) | {name: None if side is None else side.to_dict() for name, side in sides.items()}


def frame_confusions(judge: SuccessDetector, examples: Examples, threshold: float = 0.5) -> dict[str, Confusion]:
    """Return the confusion over frames of labelled videos, by view: as recorded, as reconstructed."""
    truth = examples.videos.success.numpy() > 0
    views = _detect(judge, examples, threshold)
    return {name: Confusion.from_outcomes(guess, truth, doubt) for name, (guess, doubt) in views.items()}


def episode_confusions(judge: SuccessDetector, examples: Examples, threshold: float = 0.5) -> dict[str, Confusion]:
    """Return the confusion over episodes, which succeed if any frame does; use it to correct rates over episodes.

    An episode with only uncertain successes is an abstention.
    """
    starts = examples.videos.episodes.starts
    truth = np.logical_or.reduceat(examples.videos.success.numpy() > 0, starts)
    found = {}
    for name, (guess, doubt) in _detect(judge, examples, threshold).items():
        sure, unsure = (np.logical_or.reduceat(guess & side, starts) for side in (~doubt, doubt))
        found[name] = Confusion.from_outcomes(sure, truth, unsure & ~sure)
    return found


def _detect(
    judge: SuccessDetector, examples: Examples, threshold: float
) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Return masks `(F,)` of detected successes and of uncertain frames, by view."""
    found = {}
    for view, name in enumerate(VIEWS[: len(examples.views)]):
        parts = [
            judge(clips, examples.videos.proprio[frames][:, None])
            for frames, clips in examples.batches(examples.videos.spec.context, view)
        ]
        success = torch.cat([part.success for part in parts]).cpu().numpy() >= threshold
        found[name] = success, torch.cat([part.uncertain for part in parts]).cpu().numpy()
    return found


def rogan_gladen(
    successes: int, n: int, confusion: Confusion, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Estimate the true success rate from `successes` of `n` clips (Rogan and Gladen 1978).

    (detected rate + specificity - 1) / (sensitivity + specificity - 1), clipped to [0, 1]. The interval includes the
    uncertainty of all three rates, each sampled from its posterior under Jeffreys' prior. None is returned where the
    detector is not better than chance or one class was never measured.
    """
    if confusion.sensitivity is None or confusion.specificity is None:
        return None
    sensitivity, specificity = confusion.sensitivity.estimate, confusion.specificity.estimate
    if sensitivity + specificity <= 1:
        return None
    rng = np.random.default_rng(seed)

    def posterior(k: int, total: int) -> Array:
        return rng.beta(k + 0.5, total - k + 0.5, size=resamples)

    positives = confusion.true_positives + confusion.false_negatives
    negatives = confusion.true_negatives + confusion.false_positives
    drawn = _corrected(
        posterior(successes, n),
        posterior(confusion.true_positives, positives),
        posterior(confusion.true_negatives, negatives),
    )
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    estimate = float(_corrected(np.array(successes / n), np.array(sensitivity), np.array(specificity)))
    return Interval(estimate, min(float(low), estimate), max(float(high), estimate), n, level)


def _corrected(rate: Array, sensitivity: Array, specificity: Array) -> Array:
    """Correct rates; samples of a detector that is not better than chance give 0 or 1, by their numerator."""
    denominator = np.maximum(sensitivity + specificity - 1, 1e-9)
    return np.clip((rate + specificity - 1) / denominator, 0, 1)


def _show(interval: Interval | None) -> str:
    return f"{interval:.2f}" if interval else "-"
