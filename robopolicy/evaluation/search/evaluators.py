"""What plays the episodes of a search: a simulator here; a learned world model can take its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from robopolicy.evaluation.harness import play
from robopolicy.evaluation.result import EvalResult
from robopolicy.policies.base import Policy
from robopolicy.sim.contract import VectorSim


class Evaluator(Protocol):
    """Plays episodes. The same policy and seeds must give the same outcomes, or candidates do not share them."""

    def __call__(self, policy: Policy, seeds: Sequence[int]) -> EvalResult:
        """Outcomes of the consecutive episode `seeds`, in that order: success, or returns where there is none."""
        ...


class SimEvaluator:
    """Plays in a simulator, as `robopolicy eval` does."""

    def __init__(
        self,
        sim: VectorSim,
        *,
        deterministic: bool = True,
        probe: bool = False,
        measure: str = "success",
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Play in `sim`.

        Args:
            sim: Simulator of the task, with any number of environments.
            deterministic: Switch exploration noise off.
            probe: Measure the latency of single decisions, too.
            measure: What to tell of the episodes: success where the task defines it, or `return` alone.
            progress: Called after every decision with the number of finished episodes.
        """
        self.sim = sim
        self.deterministic = deterministic
        self.probe = probe
        self.measure = measure
        self.progress = progress

    def __call__(self, policy: Policy, seeds: Sequence[int]) -> EvalResult:
        """Play the episodes."""
        played = play(
            policy, self.sim, seeds, deterministic=self.deterministic, probe=self.probe, progress=self.progress
        )
        return played if self.measure == "success" else replace(played, success=None)
