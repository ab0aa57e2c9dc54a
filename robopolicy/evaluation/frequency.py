"""Frequency curves: the score of a policy that decides every 1, 2, 4, ... control steps (Patel and Siegelmann 2024).

A policy that was trained to decide in every step often fails if its action is repeated for a few steps; a policy with
chunks executes more of the chunk. The frequency-averaged score is the area under the score over the number of repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.constraints import check_count
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import Actor, as_actor
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.report import Table, percent
from robopolicy.evaluation.result import EvalResult
from robopolicy.policies.base import Policy
from robopolicy.sim.contract import Observation, VectorSim


class ActionRepeatActor:
    """Actor that decides every `hold` control steps: the start of each chunk, with its last action repeated."""

    def __init__(self, actor: Actor, hold: int) -> None:
        self._actor = actor
        self.action_horizon = hold
        self.obs_horizon = actor.obs_horizon
        self.network_calls = actor.network_calls
        self.policy_calls = 0

    def __call__(self, sim: VectorSim, obs: Observation, rows: Tensor, seeds: Tensor, decisions: Tensor) -> Tensor:
        """Return chunks `(R, hold, A)`."""
        before = self._actor.policy_calls
        chunk = self._actor(sim, obs, rows, seeds, decisions)[:, : self.action_horizon]
        self.policy_calls += self._actor.policy_calls - before
        return torch.cat([chunk, chunk[:, -1:].expand(-1, self.action_horizon - chunk.shape[1], -1)], 1)


def check_action_repeats(action_repeats: Sequence[int]) -> None:
    """Raise a UserError for fewer than two lengths, or lengths that do not increase from at least 1."""
    if len(action_repeats) < 2 or action_repeats[0] < 1 or any(b <= a for a, b in pairwise(action_repeats)):
        given = " ".join(str(m) for m in action_repeats)
        raise UserError(f"Action repeats must be at least two increasing numbers, such as 1 2 4 8; got {given}.")
    check_count("hold", action_repeats[-1], 1)


def frequency_curve(
    policy: Policy | Actor,
    sim: VectorSim,
    action_repeats: Sequence[int],
    *,
    episodes: int = 100,
    seed: int = 10_000,
    deterministic: bool = True,
) -> dict[int, EvalResult]:
    """Evaluate the same episodes with a decision every m control steps, for each m of `action_repeats`.

    Other arguments are as in `evaluate`. Longer chunks are cut, shorter ones end with repeated actions.
    """
    check_action_repeats(action_repeats)
    with as_actor(policy, sim, deterministic=deterministic) as actor:
        return {m: evaluate(ActionRepeatActor(actor, m), sim, episodes=episodes, seed=seed) for m in action_repeats}


def frequency_score(curve: Mapping[int, EvalResult], best: float = 1.0, worst: float = 0.0) -> float:
    """Return the mean score over the numbers of repeats by the trapezoidal rule, 0 at `worst` and 1 at `best`.

    Deviation: the published score divides by the largest number instead of the range, so that its best is 29/30.
    """
    action_repeats = np.array(list(curve), dtype=np.float64)
    values = np.array([(result.outcomes.mean() - worst) / (best - worst) for result in curve.values()])
    return float(np.trapezoid(values, action_repeats) / (action_repeats[-1] - action_repeats[0]))


def frequency_scores(curves: Mapping[str, Mapping[int, EvalResult]]) -> dict[str, float]:
    """Score each policy; returns are scaled from 0, or the lowest mean if negative, to the highest mean."""
    results = [result for curve in curves.values() for result in curve.values()]
    if all(result.success is not None for result in results):
        return {label: frequency_score(curve) for label, curve in curves.items()}
    means = [float(result.returns.mean()) for result in results]
    worst, best = min(0.0, *means), max(means)
    span = best if best > worst else worst + 1.0
    return {label: frequency_score(curve, span, worst) for label, curve in curves.items()}


def frequency_table(curves: Mapping[str, Mapping[int, EvalResult]]) -> Table:
    """Return the header and one row per policy: score at each number of repeats, and the frequency-averaged score."""
    action_repeats = list(next(iter(curves.values())))
    scores = frequency_scores(curves)
    rows = [
        [label, *(_cell(curve[m]) for m in action_repeats), f"{scores[label]:.3f}"] for label, curve in curves.items()
    ]
    return ["policy", *(f"every {m}" for m in action_repeats), "score, 0 to 1"], rows


def frequency_facts(curves: Mapping[str, Mapping[int, EvalResult]]) -> dict[str, Any]:
    """Return JSON-ready summaries by policy and number of repeats, and the scores."""
    summaries = {label: {str(m): result.summary() for m, result in curve.items()} for label, curve in curves.items()}
    return {"action_repeats": summaries, "frequency_scores": frequency_scores(curves)}


def _cell(result: EvalResult) -> str:
    success = result.success_interval()
    return percent(success) if success else f"{result.return_interval():.4g}"
