"""Diagnostics of a run, without gradients: coverage, entropy, interference."""

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
    """Compute the fraction of the solved prompts that the base policy never solved in its samples (Lin and Xu 2025).

    Args:
        solved: (P,) bool.
        base_successes: (P,) successes of the base policy.
    """
    return masked_mean((base_successes == 0).double(), solved)


def entropy_law(entropy: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Fit a and b of `reward = -a exp(entropy) + b` to measurements `(M,)` (Cui et al. 2025).

    `b - a` is the reward at entropy 0.
    """
    if entropy.numel() < 2:
        raise ValueError("The entropy law needs at least two measurements.")
    x, y = entropy.double().exp(), reward.double()
    centred = x - x.mean()
    slope = (centred * (y - y.mean())).sum() / centred.square().sum().clamp(min=1e-12)
    return -slope, y.mean() - slope * x.mean()


def entropy_drift(logp: Tensor, advantage: Tensor, decisions: Decisions) -> Tensor:
    """Compute Cov(logp, A) over decisions; times the step size, it predicts the loss of entropy (Cui et al. 2025)."""
    return masked_mean(covariance(logp.detach(), advantage, decisions), decisions.valid())


def interference(before: Tensor, after: Tensor, decisions: Decisions, trained: Tensor) -> Tensor:
    """Compute the mean change of log-probability of answers to groups that an update did not train on.

    Source: Nguyen et al. 2025.

    Args:
        before: (N, T) log-probabilities of the answers before the update.
        after: (N, T) log-probabilities after the update.
        decisions: Answers, with mask, groups and trajectories.
        trained: (G,) ids of the groups that were trained on.
    """
    other = ~torch.isin(by_group(decisions), trained)
    segments = Segments(by_trajectory(decisions), decisions.valid() & other)
    change = segments.sum((after - before).detach())
    return change.sum() / (segments.count > 0).sum().clamp(min=1)
