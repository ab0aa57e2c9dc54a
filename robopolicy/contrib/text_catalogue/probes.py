"""Diagnostics of a run: coverage, entropy, interference. None has a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions, by_group, by_trajectory
from robopolicy.core.ratios import covariance
from robopolicy.core.segments import Segments


def coverage_shrinks(before: tuple[float, float], after: tuple[float, float], slack: float = 0.0) -> bool:
    """Whether pass@1 rose while pass@K fell by more than `slack`; each pair is (pass@1, pass@K).

    Source: Nguyen et al. 2025.
    """
    return after[0] > before[0] and after[1] < before[1] - slack


def without_support(solved: Tensor, base_successes: Tensor) -> Tensor:
    """Share of the solved prompts that the base policy never solved in its samples (Lin and Xu 2025).

    Args:
        solved: (P,) bool.
        base_successes: (P,) successes of the base policy.
    """
    return masked_mean((base_successes == 0).double(), solved)


def entropy_law(entropy: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Least-squares fit of `reward = -a exp(entropy) + b` (Cui et al. 2025) on measurements `(M,)`; a and b.

    `b - a` is the reward at which the entropy is used up.
    """
    if entropy.numel() < 2:
        raise ValueError("The entropy law needs at least two measurements.")
    x, y = entropy.double().exp(), reward.double()
    centred = x - x.mean()
    slope = (centred * (y - y.mean())).sum() / centred.square().sum().clamp(min=1e-12)
    return -slope, y.mean() - slope * x.mean()


def entropy_drift(logp: Tensor, advantage: Tensor, decisions: Decisions) -> Tensor:
    """Cov(logp, A) over the decisions: entropy falls by about the step size times it (Cui et al. 2025)."""
    return masked_mean(covariance(logp.detach(), advantage, decisions), decisions.valid())


def interference(before: Tensor, after: Tensor, decisions: Decisions, trained: Tensor) -> Tensor:
    """What an update on some groups did to known answers of the others: mean change of their log-probability.

    Source: Nguyen et al. 2025.

    Args:
        before: (N, T) log-probabilities of the answers before the update.
        after: (N, T) after it.
        decisions: Gives mask, groups and trajectories of the answers.
        trained: (G,) ids of the groups that were trained on.
    """
    other = ~torch.isin(by_group(decisions), trained)
    segments = Segments(by_trajectory(decisions), decisions.valid() & other)
    change = segments.sum((after - before).detach())
    return change.sum() / (segments.count > 0).sum().clamp(min=1)
