"""Evaluation results with one row per episode seed, their cost, summary and comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import (
    Interval,
    PairedDifference,
    bootstrap_mean,
    paired_difference,
    sample_warning,
    wilson,
)
from robopolicy.plurals import counted

RESULT_VERSION = 1


@dataclass(frozen=True)
class Cost:
    """Cost of an evaluation."""

    network_calls: int  # network evaluations per decision (chunk)
    decisions: int  # decisions (chunks) in the scored episodes
    steps: int  # control steps of the scored episodes
    policy_calls: int  # batched calls of the policy
    wall_s: float  # duration of all episodes including simulation [s]
    latency_ms: float = 0.0  # median time of one decision for one robot (batch of 1); 0 if not measured
    latency_p95_ms: float = 0.0

    @property
    def network_calls_per_action(self) -> float:
        """Network evaluations per executed action."""
        return self.network_calls * self.decisions / max(self.steps, 1)

    @property
    def ms_per_action(self) -> float:
        """Median decision time per executed action."""
        return self.latency_ms * self.decisions / max(self.steps, 1)

    @property
    def steps_per_s(self) -> float:
        """Scored control steps per second of wall time."""
        return self.steps / max(self.wall_s, 1e-9)


@dataclass(frozen=True, eq=False)
class EvalResult:
    """Outcomes of a fixed set of episodes; row i is episode seed `seeds[i]`."""

    task: str
    seeds: NDArray[np.int64]  # (n,)
    returns: NDArray[np.float64]  # (n,) undiscounted sum of rewards
    lengths: NDArray[np.int64]  # (n,) control steps
    success: NDArray[np.bool_] | None  # (n,) succeeded at a step that counts; None where the task defines no success
    cost: Cost
    seeded: bool = True  # False where the backend cannot reproduce episodes from seeds, which then only count them
    diverged: int = 0  # episodes ended by a diverged simulation; they count with their return so far
    success_step: str = "any"  # steps whose success counts: any | last

    @property
    def n(self) -> int:
        """Number of episodes."""
        return int(self.seeds.size)

    @property
    def outcomes(self) -> NDArray[np.float64]:
        """Outcomes to maximise `(n,)`: success as 0 or 1 where the task defines it, else return."""
        return self.returns if self.success is None else self.success.astype(np.float64)

    def success_interval(self, level: float = 0.95) -> Interval | None:
        """Success rate with its Wilson interval."""
        return None if self.success is None else wilson(int(self.success.sum()), self.n, level)

    def return_interval(self, level: float = 0.95) -> Interval:
        """Mean return with its BCa bootstrap interval."""
        return bootstrap_mean(self.returns, level=level)

    def warnings(self) -> list[str]:
        """Return warnings for the reader."""
        few = sample_warning(self.n, rate=self.success is not None)
        unseeded = "The backend of this task cannot reproduce an episode from its seed; results vary from run to run."
        lost = f"{self.diverged} of {counted(self.n, 'episode')} ended because the simulation diverged."
        return [text for text in (few, None if self.seeded else unseeded, lost if self.diverged else None) if text]

    def summary(self) -> dict[str, Any]:
        """Return numbers for logs and reports; `success`, `low`, `high` are None where the task defines no success."""
        success, ret = self.success_interval(), self.return_interval()
        return {
            "n": self.n,
            "success": success.estimate if success else None,
            "low": success.low if success else None,
            "high": success.high if success else None,
            "return_mean": ret.estimate,
            "return_low": None if np.isnan(ret.low) else ret.low,
            "return_high": None if np.isnan(ret.high) else ret.high,
            "length_mean": float(self.lengths.mean()),
            "diverged": self.diverged,
            "network_calls_per_action": self.cost.network_calls_per_action,
            "latency_ms": self.cost.latency_ms,
            "latency_p95_ms": self.cost.latency_p95_ms,
            "ms_per_action": self.cost.ms_per_action,
            "policy_calls": self.cost.policy_calls,
            "steps_per_s": self.cost.steps_per_s,
            "wall_s": self.cost.wall_s,
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form with every episode; floats are exact."""
        return {
            "version": RESULT_VERSION,
            "task": self.task,
            "seeded": self.seeded,
            "success_step": self.success_step,
            "summary": self.summary(),
            "cost": asdict(self.cost),
            "episodes": {
                "seed": self.seeds.tolist(),
                "success": None if self.success is None else self.success.tolist(),
                "return": self.returns.tolist(),
                "length": self.lengths.tolist(),
            },
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> EvalResult:
        """Inverse of `to_dict`; a UserError is raised for another version."""
        if data.get("version") != RESULT_VERSION:
            raise UserError(
                f"Expected an evaluation result of version {RESULT_VERSION}, found {data.get('version')!r}; "
                "run the evaluation again with this version of robopolicy."
            )
        rows = data["episodes"]
        success = rows["success"]
        return cls(
            task=data["task"],
            seeds=np.asarray(rows["seed"], dtype=np.int64),
            returns=np.asarray(rows["return"], dtype=np.float64),
            lengths=np.asarray(rows["length"], dtype=np.int64),
            success=None if success is None else np.asarray(success, dtype=np.bool_),
            cost=Cost(**data["cost"]),
            seeded=data["seeded"],
            diverged=data["summary"].get("diverged", 0),
            success_step=data.get("success_step", "any"),
        )


def concat_results(parts: Sequence[EvalResult]) -> EvalResult:
    """Concatenate results of one policy on several sets of episodes; latencies come from the first."""
    if len(parts) == 1:
        return parts[0]
    wins = [part.success for part in parts if part.success is not None]
    counted = ("decisions", "steps", "policy_calls", "wall_s")
    return EvalResult(
        task=parts[0].task,
        seeds=np.concatenate([part.seeds for part in parts]),
        returns=np.concatenate([part.returns for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        success=np.concatenate(wins) if len(wins) == len(parts) else None,
        cost=replace(parts[0].cost, **{name: sum(getattr(part.cost, name) for part in parts) for name in counted}),
        seeded=all(part.seeded for part in parts),
        diverged=sum(part.diverged for part in parts),
        success_step=parts[0].success_step,
    )


@dataclass(frozen=True, eq=False)
class Comparison:
    """Comparison of two results on their common seeds, second minus first."""

    seeds: NDArray[np.int64]  # (n,)
    outcomes: NDArray[np.bool_] | None  # (n, 2) success of first and second; None where the task defines no success
    success: PairedDifference | None
    returns: PairedDifference

    @property
    def headline(self) -> PairedDifference:
        """The difference to report: success where it is defined, else return."""
        return self.success or self.returns

    def sentence(self, first: str = "the first", second: str = "the second") -> str:
        """Return the result as a sentence with names of both policies."""
        paired, interval = self.headline, self.headline.difference
        if self.success is not None:
            size, low, high = (f"{100 * value:+.1f}" for value in (interval.estimate, interval.low, interval.high))
            amount = f"{size} points of success [{low}, {high}]"
        else:
            amount = f"{interval.estimate:+.3g} return [{interval.low:+.3g}, {interval.high:+.3g}]"
        if paired.is_distinct:
            verdict = f"{second} is {'better' if interval.low > 0 else 'worse'} than {first}"
        else:
            verdict = f"{second} and {first} are not distinguishable"
        return (
            f"{verdict}: {amount}; better on {paired.wins}, worse on {paired.losses}, equal on {paired.ties} of "
            f"{interval.n} common seeds, {format_p(paired.p_value)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "n": int(self.seeds.size),
            "success": None if self.success is None else asdict(self.success),
            "return": asdict(self.returns),
        }


def compare(first: EvalResult, second: EvalResult) -> Comparison:
    """Pair two results of one seeded task by episode seed; at least two seeds must be common."""
    if first.task != second.task:
        raise UserError(f"Only results of one task can be compared, got {first.task} and {second.task}.")
    if first.success_step != second.success_step:
        raise UserError("One result counts success at any step and the other at the last step; evaluate both alike.")
    if not (first.seeded and second.seeded):
        raise UserError(
            f"The backend of {first.task} has no reproducible episodes to pair; compare the two intervals instead."
        )
    seeds, a, b = np.intersect1d(first.seeds, second.seeds, assume_unique=True, return_indices=True)
    if seeds.size < 2:
        raise UserError(
            f"A paired comparison needs common seeds, found {seeds.size}; evaluate both with the same --seed."
        )
    outcomes = None
    if first.success is not None and second.success is not None:
        outcomes = np.stack([first.success[a], second.success[b]], 1)
    return Comparison(
        seeds=seeds,
        outcomes=outcomes,
        success=None if outcomes is None else paired_difference(outcomes[:, 0], outcomes[:, 1]),
        returns=paired_difference(first.returns[a], second.returns[b]),
    )


def format_p(p: float) -> str:
    """Format a p-value."""
    return f"p = {p:.2f}" if p >= 0.095 else f"p = {p:.2g}" if p >= 1e-4 else "p < 0.0001"
