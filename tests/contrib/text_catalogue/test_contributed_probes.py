"""Tests of diagnostics against counts, closed forms and known limits."""

from __future__ import annotations

import pytest
import torch

from robopolicy.contrib.text_catalogue.probes import (
    coverage_shrinks,
    entropy_drift,
    entropy_law,
    interference,
    without_support,
)
from robopolicy.core.decisions import Decisions


def test_coverage_shrinks_only_if_pass_at_1_rises_and_pass_at_k_falls() -> None:
    assert coverage_shrinks((0.3, 0.9), (0.5, 0.8))
    assert not coverage_shrinks((0.3, 0.9), (0.5, 0.95))
    assert not coverage_shrinks((0.3, 0.9), (0.2, 0.8))
    assert not coverage_shrinks((0.3, 0.9), (0.5, 0.89), slack=0.02)


def test_without_support_counts_only_solved_prompts() -> None:
    solved, base = torch.tensor([True, True, False, True]), torch.tensor([0, 2, 0, 0])
    assert without_support(solved, base).item() == pytest.approx(2 / 3)


def test_the_entropy_law_is_recovered() -> None:
    entropy = torch.linspace(0.1, 2.0, 9)
    a, b = entropy_law(entropy, -0.3 * entropy.exp() + 1.1)
    assert (a.item(), b.item()) == pytest.approx((0.3, 1.1), rel=1e-5)
    with pytest.raises(ValueError, match="at least two"):
        entropy_law(torch.ones(1), torch.ones(1))


def test_entropy_drift_matches_the_first_order_entropy_decrease() -> None:
    """A natural-gradient step `logits + eta A` changes H by -eta Cov(log pi, A) to first order."""
    generator = torch.Generator().manual_seed(0)
    logits, advantage = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    entropy = lambda x: -(x.softmax(0) * x.log_softmax(0)).sum()  # noqa: E731
    counts = torch.multinomial(logits.softmax(0), 400_000, replacement=True, generator=generator)
    sample = Decisions(logits.log_softmax(0)[counts].unsqueeze(1))
    drift = entropy_drift(sample.logp_old, advantage[counts].unsqueeze(1), sample)
    eta = 1e-5
    change = (entropy(logits + eta * advantage) - entropy(logits)) / eta
    assert drift.item() == pytest.approx(-change.item(), abs=0.01)


def test_interference_counts_only_untrained_prompts() -> None:
    decisions = Decisions(
        torch.zeros(3, 2), group=torch.tensor([0, 1, 2]), mask=torch.tensor([[1, 1], [1, 0], [1, 1]]).bool()
    )
    after = torch.tensor([[5.0, 5.0], [-1.0, 9.0], [0.5, 0.5]])
    assert interference(torch.zeros(3, 2), after, decisions, torch.tensor([0])).item() == pytest.approx(0.0)
    assert interference(torch.zeros(3, 2), after, decisions, torch.tensor([0, 2])).item() == pytest.approx(-1.0)
