"""Test whether a world model distinguishes recorded successes from recorded failures.

Replays execute the actions of recorded episodes. Episodes that succeeded are a known good policy, and episodes that
failed a known bad one. A model can follow every action for one frame and still predict that neither succeeds; its
scores then rank nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.evaluation.intervals import Interval, wilson
from robopolicy.worldmodel.replays import Replays

MIN_EPISODES = 5  # recorded successes, and failures, that the test needs; 5 of 5 against 0 of 5 differ significantly


@dataclass(frozen=True)
class PredictedOutcomes:
    """Rates of predicted success with 95 % intervals; None where fewer than `MIN_EPISODES` were recorded."""

    successes: Interval | None  # in replays of recorded successes
    failures: Interval | None  # in replays of recorded failures
    recorded: tuple[int, int]  # successes and failures

    @classmethod
    def of(cls, replays: Replays) -> PredictedOutcomes:
        """Rates in `replays`."""
        predicted = replays.logits >= 0
        good, bad = predicted[replays.recorded], predicted[~replays.recorded]
        return cls(_rate(good), _rate(bad), (len(good), len(bad)))

    def describe(self) -> str:
        """One sentence with the rates, or why they are unknown."""
        if self.successes is None or self.failures is None:
            good, bad = self.recorded
            return (
                "Whether it distinguishes good from bad policies was not tested, because that takes "
                f"{MIN_EPISODES} recorded successes and failures: it had {good} and {bad}."
            )
        return f"From the actions of recorded episodes {self._rates()}."

    def _rates(self) -> str:
        assert self.successes is not None and self.failures is not None
        return (
            f"it predicts success for {self.successes.estimate:.0%} of {self.successes.n} recorded successes and "
            f"{self.failures.estimate:.0%} of {self.failures.n} recorded failures"
        )

    def reasons(self) -> tuple[str, ...]:
        """Return why the test failed: success is not predicted significantly more often for recorded successes."""
        if self.successes is None or self.failures is None or self.successes.low > self.failures.high:
            return ()
        return (f"It does not distinguish good from bad policies: {self._rates()}.",)


def _rate(predicted: Tensor) -> Interval | None:
    return wilson(int(predicted.sum()), len(predicted)) if len(predicted) >= MIN_EPISODES else None
