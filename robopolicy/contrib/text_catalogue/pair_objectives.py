"""Objectives on preference pairs, and their helper functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.constraints import Fraction, NonNegative, Positive
from robopolicy.core.decisions import Decisions, by_group, by_trajectory, first_rows
from robopolicy.core.objectives import Info, logistic_pair, mean_or_zero, pair_accuracy, preference_pairs, scores
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments


@dataclass(frozen=True)
class Contrastive:
    """CPL (Hejna et al. 2023): preference by discounted log-probabilities instead of advantages.

    Without reference: `-log sigmoid(alpha (s+ - penalty s-))` with `s = sum_t gamma^t logp_t`, t the unit. With a
    `penalty` below 1, the likelihood of the losing segment is not driven to 0.
    """

    alpha: NonNegative = 0.1
    penalty: NonNegative = 0.5  # lambda_b in (0, 1]
    gamma: Fraction = 1.0  # per unit

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over pairs."""
        segments = Segments(by_trajectory(decisions), decisions.valid())
        time = decisions.unit if decisions.unit is not None else torch.zeros_like(decisions.depths())
        score = segments.broadcast(segments.sum(logp * torch.pow(self.gamma, time.to(logp.dtype))))[:, 0]
        chosen, rejected = preference_pairs(decisions, advantage[:, 0])
        loss = logistic_pair(score[chosen], self.penalty * score[rejected], self.alpha)
        return mean_or_zero(loss), pair_accuracy(score, chosen, rejected)


@dataclass(frozen=True)
class SoftPair:
    """DNO (Rosset et al. 2024): regression on preference probabilities between trajectories of the last policy.

    The value of a trajectory is its win rate in the group, ties counting half; the preference between two is `q =
    sigmoid(difference of their values)`. Cross-entropy of q with `sigmoid(eta (log pi / pi_old - log pi' / pi_old'))`
    over all pairs.
    """

    eta: Positive = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over pairs."""
        change = log_ratio(logp, decisions.logp_old, decisions, "sequence")[:, 0]
        first, second = group_pairs(decisions)
        value = win_rate(decisions, advantage[:, 0])
        target = torch.sigmoid(value[first] - value[second])
        margin = self.eta * (change[first] - change[second])
        loss = -target * functional.logsigmoid(margin) - (1.0 - target) * functional.logsigmoid(-margin)
        return mean_or_zero(loss), pair_accuracy(change, *preference_pairs(decisions, advantage[:, 0]))


@dataclass(frozen=True)
class NashPair:
    """Self-play towards the Nash policy near the reference (Nash-MD, Nash-MP, Tiapkin et al. 2025).

    `sum_t beta sg[log pi / pi_ref] logp - (P - 1/2) sum_t logp`, with P the win rate of the trajectory in its group.
    Opponents come from the same batch; sample them from an averaged or mixed policy for the mirror-prox step.
    """

    beta: NonNegative = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over trajectories."""
        first = first_rows(decisions)
        segments = Segments(by_trajectory(decisions), decisions.valid())
        total = segments.broadcast(segments.sum(logp))[first, 0]
        pull = scores(logp, decisions).detach()[first]
        wins = win_rate(decisions, advantage[:, 0])[first]
        return ((self.beta * pull - (wins - 0.5)) * total).mean(), {"kl_ref": pull.mean()}


@dataclass(frozen=True)
class AnchoredPair:
    """SePPO: demonstrations against samples of an earlier policy, with a test of whether the sample is worse.

    Source: Zhang et al. 2024.

    The demonstration is the preferred trajectory. If the log-ratio of the sample to the reference exceeds the log-ratio
    of the demonstration (anchor test), the sample counts as worse and is suppressed, otherwise it is imitated: `-log
    sigmoid(beta (r+ -+ r-))`.
    """

    beta: NonNegative = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over pairs; 0 if no two outcomes differ."""
        score = scores(logp, decisions)
        chosen, rejected = preference_pairs(decisions, advantage[:, 0])
        shown, sample = score[chosen], score[rejected]
        sign = torch.where(sample.detach() > shown.detach(), 1.0, -1.0).to(score)
        return mean_or_zero(logistic_pair(shown, sign * sample, self.beta)), {
            "pushed": mean_or_zero((sign > 0).to(score))
        }


def group_pairs(decisions: Decisions) -> tuple[Tensor, Tensor]:
    """Return the first rows (P,) and (P,) of all ordered pairs of different trajectories of one group."""
    first = first_rows(decisions)
    group = by_group(decisions)[first, 0]
    same = group.unsqueeze(1) == group.unsqueeze(0)
    left, right = torch.nonzero(same & ~torch.eye(len(first), dtype=torch.bool, device=first.device)).unbind(1)
    return first[left], first[right]


def win_rate(decisions: Decisions, outcome: Tensor) -> Tensor:
    """Compute win rates of trajectories in their groups, ties counting half, at the first row `(N,)`; 0 elsewhere."""
    left, right = group_pairs(decisions)
    wins = 0.5 + 0.5 * torch.sign(outcome[left] - outcome[right])
    total = wins.new_zeros(len(decisions)).index_add(0, left, wins)
    return total / torch.bincount(left, minlength=len(decisions)).clamp(min=1)


def squared_difference(first: Tensor, second: Tensor, target: float | Tensor) -> Tensor:
    """Compute `(first - second - target)^2` per pair `(P,)`.

    With `target = 1 / (2 beta)` for (chosen, rejected) it is IPO; with `target = (reward - reward') / beta` for any two
    trajectories of a group it is the reward-difference regression of REBEL and CoPG.
    """
    return (first - second - target) ** 2


def self_test_pair(passes: Tensor) -> tuple[int, int, int] | None:
    """Select a preference pair from generated programs and tests (DSTC, Liu et al. 2024).

    The chosen program passes most tests, the rejected one fewest. Of the tests that only the chosen one passes, the
    test that most programs pass is selected.

    Args:
        passes: (C, T) bool, whether program c passes test t.

    Returns:
        Indices of the chosen program, the rejected program and the test; None if no test distinguishes them.
    """
    score = passes.sum(1)
    chosen, rejected = int(score.argmax()), int(score.argmin())
    distinguishing = passes[chosen] & ~passes[rejected]
    if not bool(distinguishing.any()):
        return None
    return chosen, rejected, int(torch.where(distinguishing, passes.sum(0), -1).argmax())
