"""The card of a dataset: what it holds, how good it is, what may be wrong with it, and what to learn from it with.

Quality and coverage are those of Schweighofer et al. (2021; `robopolicy.data.quality`), whose experiments say:
learners that nothing ties to the data need high coverage, learners that stay near the data do well where quality or
coverage is high, and plain imitation competes with the best of them where quality is high. From which value on a number
is high is ours (`HIGH`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from robopolicy.data.episodes import Episodes
from robopolicy.data.quality import (
    BINS,
    Coverage,
    clipped_actions,
    constant_entries,
    coverage,
    idle_fraction,
    repeated_episodes,
    returns_of,
    trajectory_quality,
)
from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import Interval, bootstrap_mean, sample_warning, wilson
from robopolicy.evaluation.report import Table, percent

HIGH = 0.75  # quality and coverage from which on they are called high
CLIPPED = 0.05  # share of steps at a bound, and of idle steps below, that is worth a warning
IDLE = 0.2
CROWDED = 0.95  # share of steps that show something new, beyond which bins are too fine for SACo to say anything

ADVICE = {
    "imitation": "behaviour cloning (bc): the data is good, and imitation competes with the best that offline RL does",
    "constrained": "policy-constrained offline RL (iql, idql, cal_ql, fql, qc), which stays near the data",
    "unconstrained": "off-policy RL that nothing ties to the data (sac, td3) can work; constrained offline RL is safer",
    "explore": "collect more or other data, or play (rlpd); until then constrained offline RL (iql, cal_ql)",
    "unrewarded": "behaviour cloning (bc): without rewards nothing else can be learned, and its quality is unknown",
    "unknown": "unknown without references; pass --random and --best for quality, --replay for coverage",
}
"""What to learn with, by the reason."""


@dataclass(frozen=True)
class References:
    """What the data is compared with; None where it is unknown."""

    random: float | None = None  # mean return of random actions
    best: float | None = None  # mean return of the best policy that an online learner found
    replay: Episodes | None = None  # what that learner saw


@dataclass(frozen=True)
class DatasetCard:
    """Everything the card says."""

    episodes: int
    steps: int
    rate: float  # [Hz]
    lengths: tuple[int, float, int]  # shortest, mean and longest episode [steps]
    tasks: Mapping[str, int]  # episodes by task
    behaviours: Mapping[str, int]  # and by who acted, where known
    features: Mapping[str, tuple[str, tuple[int, ...]]]  # key: type, shape of one frame
    success: Interval | None  # share of the episodes that succeeded, where recorded
    returns: Interval | None  # mean undiscounted return, where recorded
    quality: Interval | None  # TQ; its interval is that of the data's return alone
    coverage: Coverage | None  # None where the data has no vectors
    idle: float  # share of the steps in which nothing changes
    advice: str  # key of `ADVICE`
    warnings: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        plain = asdict(self) | {"advice": {"kind": self.advice, "text": ADVICE[self.advice]}}
        for name in ("success", "returns", "quality"):
            interval = getattr(self, name)
            plain[name] = interval.to_dict() if interval else None
        seen = self.coverage
        plain["coverage"] = seen and {**seen._asdict(), "share": seen.unique_fraction, "saco": seen.saco}
        return plain

    def facts(self) -> Table:
        """Header and one row per fact."""
        low, mean, high = self.lengths
        rows = [
            ["episodes", f"{self.episodes}"],
            ["steps", f"{self.steps} at {self.rate:g} Hz, {low} to {high} per episode, {mean:.1f} on average"],
            ["tasks", _counted(self.tasks)],
        ]
        rows += [["behaviours", _counted(self.behaviours)]] if self.behaviours else []
        rows += [
            ["success", percent(self.success) if self.success else "not recorded"],
            ["return", f"{self.returns:.4g}" if self.returns else "not recorded"],
            ["quality (TQ)", f"{self.quality:.2f}" if self.quality else "needs --random and --best"],
            ["coverage (SACo)", self._coverage()],
            ["idle steps", f"{100 * self.idle:.1f} %"],
        ]
        return ["fact", "value"], rows

    def table(self) -> Table:
        """Header and one row per feature."""
        rows = [[key, kind, " x ".join(map(str, shape)) or "1"] for key, (kind, shape) in self.features.items()]
        return ["feature", "type", "shape"], rows

    def _coverage(self) -> str:
        if self.coverage is None:
            return "needs vectors"
        seen = self.coverage
        counted = f"{seen.unique} different states with actions in {seen.steps} steps"
        return f"{seen.saco:.2f} ({counted})" if seen.saco is not None else f"needs --replay; {counted}"


def dataset_card(
    episodes: Episodes,
    references: References | None = None,
    *,
    bins: int = BINS,
    cameras: Mapping[str, tuple[int, ...]] | None = None,
    level: float = 0.95,
) -> DatasetCard:
    """Write the card of a dataset.

    Args:
        episodes: All of it; images need not be read.
        references: What to compare it with.
        bins: Per axis, to count states and actions; 0 compares the numbers as they are.
        cameras: Shapes of cameras that were not read.
        level: Of the intervals.

    Raises:
        UserError: A reference does not fit.
    """
    data, known = episodes.without_closing_frames(), references or References()
    returns = returns_of(data)
    earned = None if returns is None else bootstrap_mean(returns, level=level)
    success = None
    if "success" in data.arrays:
        success = wilson(int(data.success.sum()), data.num_episodes, level)
    quality = _quality(earned, known)
    seen = _coverage(data, known.replay, bins)
    saco = seen.saco if seen and seen.unique_fraction <= CROWDED else None
    features = {key: (array.dtype.name, array.shape[1:]) for key, array in data.arrays.items()}
    features |= {key: ("uint8", shape) for key, shape in (cameras or {}).items()}
    idle = idle_fraction(data)
    lengths = data.lengths
    return DatasetCard(
        episodes=data.num_episodes,
        steps=len(data),
        rate=round(1 / data.control_dt, 6),
        lengths=(int(lengths.min()), float(lengths.mean()), int(lengths.max())),
        tasks=dict(Counter(data.tasks).most_common()),
        behaviours=dict(Counter(who for who in data.behaviours if who).most_common()),
        features=features,
        success=success,
        returns=earned,
        quality=quality,
        coverage=seen,
        idle=idle,
        advice=recommend(quality.estimate if quality else None, saco, returns is not None, success),
        warnings=tuple(_warnings(data, success, earned, seen, idle)),
    )


def recommend(quality: float | None, saco: float | None, rewarded: bool, success: Interval | None = None) -> str:
    """What to learn with, a key of `ADVICE`; the success rate stands in for a quality that is not known.

    Args:
        quality: TQ.
        saco: State-action coverage, where it says anything.
        rewarded: Whether rewards are recorded.
        success: Success rate of the data.
    """
    if quality is None and success is not None:
        quality = success.estimate
    good, wide = (value is not None and value >= HIGH for value in (quality, saco))
    if good:
        return "imitation"
    if not rewarded:
        return "unrewarded"
    if wide:
        return "unconstrained"
    if quality is None:
        return "unknown"
    return "explore" if quality < 1 - HIGH and saco is not None else "constrained"


def _quality(earned: Interval | None, known: References) -> Interval | None:
    """TQ of the mean return and of the ends of its interval."""
    if known.random is None or known.best is None:
        return None
    if earned is None:
        raise UserError("Trajectory quality needs rewards, and the dataset has none; leave --random and --best out.")
    low, mean, high = (
        trajectory_quality(value, known.random, known.best) for value in (earned.low, earned.estimate, earned.high)
    )
    return Interval(mean, low, high, earned.n, earned.level)


def _coverage(data: Episodes, replay: Episodes | None, bins: int) -> Coverage | None:
    try:
        return coverage(data, replay.without_closing_frames() if replay else None, bins)
    except UserError:
        if replay is not None or bins < 0:
            raise
        return None  # images alone


def _warnings(
    data: Episodes, success: Interval | None, earned: Interval | None, seen: Coverage | None, idle: float
) -> list[str]:
    """What a reader should look at."""
    found: list[str] = []
    if success is not None and (few := sample_warning(data.num_episodes)):
        found.append(few)
    if constant := constant_entries(data):
        found.append(f"{len(constant)} entries never change: {_few(constant)}.")
    clipped = {name: share for name, share in clipped_actions(data).items() if share > CLIPPED}
    if clipped:
        shares = [f"{name} in {100 * share:.0f} % of the steps" for name, share in clipped.items()]
        found.append(f"Actions seem clipped, being at their least or largest value: {_few(shares)}.")
    if idle > IDLE:
        found.append(f"Nothing changes in {100 * idle:.0f} % of the steps; imitation may learn to stand still.")
    if repeated := repeated_episodes(data):
        found.append(f"{repeated} episodes repeat earlier ones to the last number.")
    if earned is not None and np.ptp(data.arrays["reward"]) == 0:
        found.append("The reward never changes, so nothing can be learned from it.")
    if earned is not None and "terminated" not in data.arrays:
        found.append("It is not recorded which episodes were terminated; values would look beyond all ends.")
    if seen is not None and seen.reference is not None and seen.unique_fraction > CROWDED:
        found.append(
            f"Coverage says nothing: {100 * seen.unique_fraction:.0f} % of the steps are distinct, due to many "
            "numbers and few steps; use fewer --bins."
        )
    return found


def _few(texts: list[str], most: int = 6) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _counted(counts: Mapping[str, int]) -> str:
    shown = [f"{name or 'unnamed'} ({count})" for name, count in counts.items()]
    return _few(shown)
