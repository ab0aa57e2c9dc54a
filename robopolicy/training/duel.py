"""The last word on a run: its best policy against the one that it started from, in episodes that chose neither.

The best of a run's evaluations was chosen because it came out high, so it flatters, all the more the fewer episodes
an evaluation has.
"""

from __future__ import annotations

from collections.abc import Callable

from robopolicy.evaluation.harness import play
from robopolicy.evaluation.intervals import PairedDifference, paired_difference
from robopolicy.evaluation.result import EvalResult, joined
from robopolicy.policies.base import Policy
from robopolicy.sim.contract import VectorSim
from robopolicy.training.guards import ENOUGH

ROUNDS = 5  # of as many episodes as an evaluation has, so that the last word costs no more than ten evaluations


def duel(
    base: Policy, best: Policy, sim: VectorSim, *, episodes: int, seed: int, before_round: Callable[[], None]
) -> PairedDifference:
    """What `best` has over `base` in the same episodes, played in rounds until it is beyond doubt, or `ROUNDS` are.

    Args:
        base: The first policy.
        best: The second policy.
        sim: Simulator of the task.
        episodes: Of each of them in a round.
        seed: Of the first episode.
        before_round: Called before each round; may raise to give up.
    """
    played: list[tuple[EvalResult, EvalResult]] = []
    for index in range(ROUNDS):
        before_round()
        seeds = range(seed + index * episodes, seed + (index + 1) * episodes)
        first, second = (play(policy, sim, seeds) for policy in (base, best))
        played.append((first, second))
        outcome = _difference(joined([pair[0] for pair in played]), joined([pair[1] for pair in played]))
        interval = outcome.difference
        if interval.n >= ENOUGH and (interval.low > 0 or interval.high < 0):
            break
    return outcome


def _difference(first: EvalResult, second: EvalResult) -> PairedDifference:
    if first.success is None or second.success is None:
        return paired_difference(first.returns, second.returns)
    return paired_difference(first.success, second.success)
