"""Dataset cards: content, quality, coverage, warnings and a recommended kind of algorithm.

Quality and coverage are defined by Schweighofer et al. (2021; `robopolicy.data.quality`). In their experiments,
unconstrained off-policy learners need high coverage, learners that stay near the data need high quality or coverage,
and imitation competes with the best of them on data of high quality. The threshold `HIGH` is ours.
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
    outlying_entries,
    repeated_episodes,
    returns_of,
    trajectory_quality,
)
from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import Interval, bootstrap_mean, sample_warning, wilson
from robopolicy.evaluation.report import Table, percent

HIGH = 0.75  # threshold of high quality and coverage
CLIPPED = 0.05  # fraction of steps at a bound that causes a warning
IDLE = 0.2  # fraction of idle steps that causes a warning
CROWDED = 0.95  # fraction of distinct steps above which the bins are too fine for SACo

ADVICE = {
    "imitation": "behaviour cloning (bc): quality is high, and imitation competes with the best that offline RL does",
    "constrained": "policy-constrained offline RL (iql, idql, cal_ql, fql, qc), which stays near the data",
    "unconstrained": "unconstrained off-policy RL (sac, td3) can work; constrained offline RL is safer",
    "explore": "collect more or other data, or learn online (rlpd); until then constrained offline RL (iql, cal_ql)",
    "unrewarded": "behaviour cloning (bc): without rewards nothing else can be learned, and its quality is unknown",
    "unknown": "unknown without references; pass --random and --best for quality, --replay for coverage",
}
"""Recommendations by kind."""


@dataclass(frozen=True)
class References:
    """References for quality and coverage; None where unknown."""

    random: float | None = None  # mean return of random actions
    best: float | None = None  # mean return of the best policy that an online learner found
    replay: Episodes | None = None  # training data of that learner


@dataclass(frozen=True)
class DatasetCard:
    """Content of a card."""

    episodes: int
    steps: int
    rate: float  # [Hz]
    lengths: tuple[int, float, int]  # shortest, mean and longest episode [steps]
    tasks: Mapping[str, int]  # episodes by task
    behaviours: Mapping[str, int]  # episodes by behaviour, where recorded
    features: Mapping[str, tuple[str, tuple[int, ...]]]  # key: type, shape of one frame
    success: Interval | None  # success rate, where recorded
    returns: Interval | None  # mean undiscounted return, where recorded
    quality: Interval | None  # TQ; its interval only includes the uncertainty of the return
    coverage: Coverage | None  # None where the data has no vectors
    idle: float  # fraction of the steps without a change
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
        """Return the header and one row per fact."""
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
        """Return the header and one row per feature."""
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
    """Create the card of a dataset; a UserError is raised for references that do not fit.

    `bins` per axis are used to count states and actions, and 0 compares exact numbers. `cameras` has the shapes of
    cameras that are not in `episodes`.
    """
    data, known = episodes.without_closing_frames(), references or References()
    returns = returns_of(data)
    mean_return = None if returns is None else bootstrap_mean(returns, level=level)
    success = None
    if "success" in data.arrays:
        success = wilson(int(data.success.sum()), data.num_episodes, level)
    quality = _quality(mean_return, known)
    covered = _coverage(data, known.replay, bins)
    saco = covered.saco if covered and covered.unique_fraction <= CROWDED else None
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
        returns=mean_return,
        quality=quality,
        coverage=covered,
        idle=idle,
        advice=recommend(quality.estimate if quality else None, saco, returns is not None, success),
        warnings=tuple(_warnings(data, success, mean_return, covered, idle)),
    )


def recommend(quality: float | None, saco: float | None, rewarded: bool, success: Interval | None = None) -> str:
    """Return the recommendation, a key of `ADVICE`; the success rate replaces an unknown quality.

    `saco` is the state-action coverage; `rewarded` is whether rewards are recorded.
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


def _quality(returns: Interval | None, known: References) -> Interval | None:
    """Compute TQ of the mean return and of the ends of its interval."""
    if known.random is None or known.best is None:
        return None
    if returns is None:
        raise UserError("Trajectory quality needs rewards, and the dataset has none; omit --random and --best.")
    ends = (returns.low, returns.estimate, returns.high)
    low, mean, high = (trajectory_quality(value, known.random, known.best) for value in ends)
    return Interval(mean, low, high, returns.n, returns.level)


def _coverage(data: Episodes, replay: Episodes | None, bins: int) -> Coverage | None:
    try:
        return coverage(data, replay.without_closing_frames() if replay else None, bins)
    except UserError:
        if replay is not None or bins < 0:
            raise
        return None  # only images


def _warnings(
    data: Episodes, success: Interval | None, returns: Interval | None, covered: Coverage | None, idle: float
) -> list[str]:
    found: list[str] = []
    if success is not None and (few := sample_warning(data.num_episodes)):
        found.append(few)
    if constant := constant_entries(data):
        found.append(f"Entries that never change: {_few(constant)}.")
    if outlying := outlying_entries(data):
        found.append(f"Outliers set the scale of normalisation: {'; '.join(outlying[:3])}.")
    clipped = {name: share for name, share in clipped_actions(data).items() if share > CLIPPED}
    if clipped:
        shares = [f"{name} in {100 * share:.0f} % of the steps" for name, share in clipped.items()]
        found.append(f"Actions seem clipped at their smallest or largest value: {_few(shares)}.")
    if idle > IDLE:
        found.append(f"Nothing changes in {100 * idle:.0f} % of the steps; imitation may learn to stand still.")
    if repeated := repeated_episodes(data):
        found.append(f"Exact copies of earlier episodes: {repeated}.")
    if returns is not None and np.ptp(data.arrays["reward"]) == 0:
        found.append("The reward is constant, so nothing can be learned from it.")
    if returns is not None and "terminated" not in data.arrays:
        found.append("Terminations are not recorded, so values would bootstrap beyond the end of every episode.")
    if covered is not None and covered.reference is not None and covered.unique_fraction > CROWDED:
        distinct = f"{100 * covered.unique_fraction:.0f} % of the steps are distinct"
        found.append(f"Coverage is not informative: {distinct}, due to many numbers and few steps; use fewer --bins.")
    return found


def _few(texts: list[str], most: int = 6) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _counted(counts: Mapping[str, int]) -> str:
    shown = [f"{name or 'unnamed'} ({count})" for name, count in counts.items()]
    return _few(shown)
