"""Confusions of success detectors, and success rates corrected for their errors.

A judge that sees videos of known outcome has a sensitivity (successes it recognises) and a specificity (failures it
recognises). From them the Rogan-Gladen estimator gets the true rate back out of the judged one. Measure them on real
frames and on frames as the world model shows them: the second table is the one that counts.
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
    """Judged against true outcomes of clips that the judge did not abstain from."""

    true_positives: int
    false_negatives: int
    false_positives: int
    true_negatives: int
    abstained: int = 0

    @classmethod
    def from_outcomes(cls, predicted: ArrayLike, actual: ArrayLike, uncertain: ArrayLike | None = None) -> Confusion:
        """Count outcomes `(n,)`; clips that are `uncertain` `(n,)` count as abstentions alone."""
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
        """Successes that were recognised; None without any."""
        n = self.true_positives + self.false_negatives
        return wilson(self.true_positives, n) if n else None

    @property
    def specificity(self) -> Interval | None:
        """Failures that were recognised; None without any."""
        n = self.true_negatives + self.false_positives
        return wilson(self.true_negatives, n) if n else None

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and sensitivity; NaN without true or judged successes."""
        total = 2 * self.true_positives + self.false_positives + self.false_negatives
        return 2 * self.true_positives / total if total else float("nan")

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows: what was judged by what is true."""
        rows = [
            ["success", str(self.true_positives), str(self.false_negatives), _show(self.sensitivity)],
            ["failure", str(self.false_positives), str(self.true_negatives), _show(self.specificity)],
        ]
        return ["true", "judged success", "judged failure", "recognised"], rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        sides = {name: getattr(self, name) for name in ("sensitivity", "specificity")}
        return asdict(self) | {name: None if side is None else side.to_dict() for name, side in sides.items()}


def frame_confusions(judge: SuccessDetector, examples: Examples, threshold: float = 0.5) -> dict[str, Confusion]:
    """Confusion over the frames of labelled videos, by how they are shown: as filmed, as a world model shows them."""
    truth = examples.videos.success.numpy() > 0
    views = _judged(judge, examples, threshold)
    return {name: Confusion.from_outcomes(guess, truth, doubt) for name, (guess, doubt) in views.items()}


def episode_confusions(judge: SuccessDetector, examples: Examples, threshold: float = 0.5) -> dict[str, Confusion]:
    """As `frame_confusions` over episodes, which succeed with any frame; correct rates over episodes by this one.

    An episode is abstained from if it is a success by uncertain frames alone.
    """
    starts = examples.videos.episodes.starts
    truth = np.logical_or.reduceat(examples.videos.success.numpy() > 0, starts)
    found = {}
    for name, (guess, doubt) in _judged(judge, examples, threshold).items():
        sure, unsure = (np.logical_or.reduceat(guess & side, starts) for side in (~doubt, doubt))
        found[name] = Confusion.from_outcomes(sure, truth, unsure & ~sure)
    return found


def _judged(
    judge: SuccessDetector, examples: Examples, threshold: float
) -> dict[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]]:
    """Which frames `(F,)` are judged successes and which uncertain, by view."""
    found = {}
    for view, name in enumerate(VIEWS[: len(examples.views)]):
        judged = [
            judge(clips, examples.videos.proprio[frames][:, None])
            for frames, clips in examples.batches(examples.videos.spec.context, view)
        ]
        success = torch.cat([part.success for part in judged]).cpu().numpy() >= threshold
        found[name] = success, torch.cat([part.uncertain for part in judged]).cpu().numpy()
    return found


def rogan_gladen(
    successes: int, n: int, confusion: Confusion, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """True success rate behind `successes` of `n` judged clips (Rogan and Gladen 1978).

    (judged rate + specificity - 1) / (sensitivity + specificity - 1), within [0, 1]. The interval holds the uncertainty
    of all three rates: each is drawn from its posterior under Jeffreys' prior.

    Returns:
        The corrected rate; None where the judge is no better than chance or was never measured on one of the outcomes,
        for then nothing can be corrected.
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
    """Rates in [0, 1]; where a draw of the judge is no better than chance, the end to which its numerator points."""
    denominator = np.maximum(sensitivity + specificity - 1, 1e-9)
    return np.clip((rate + specificity - 1) / denominator, 0, 1)


def _show(interval: Interval | None) -> str:
    return f"{interval:.2f}" if interval else "-"
