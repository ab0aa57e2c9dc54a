"""Tests of pairwise objectives: pairs, values, gradients."""

import pytest
import torch

from robopolicy.core.advantage import outcome
from robopolicy.core.decisions import by_trajectory
from robopolicy.core.objectives import logistic_pair, preference_pairs, scores


def test_pairs_are_all_ordered_rollouts_of_a_group(decisions):
    reward, trajectory, group = outcome(decisions), by_trajectory(decisions).flatten(), decisions.require("group")
    chosen, rejected = preference_pairs(decisions, reward)
    assert bool((reward[chosen] > reward[rejected]).all())
    assert torch.equal(group[chosen], group[rejected])
    found = set(zip(trajectory[chosen].tolist(), trajectory[rejected].tolist(), strict=True))
    expected = {
        (int(trajectory[i]), int(trajectory[j]))
        for i in range(len(decisions))
        for j in range(len(decisions))
        if group[i] == group[j] and reward[i] > reward[j]
    }
    assert found == expected and len(chosen) == len(expected)


def test_equal_outcomes_give_no_pair(decisions):
    chosen, rejected = preference_pairs(decisions, torch.ones(len(decisions)))
    assert chosen.numel() == rejected.numel() == 0


def test_scores_are_the_log_ratio_of_the_whole_trajectory(decisions, shift):
    found = scores(decisions.require("logp_ref") + shift, decisions)
    trajectory, valid = by_trajectory(decisions).flatten(), decisions.valid()
    for row in range(len(decisions)):
        same = trajectory == trajectory[row]
        assert found[row].item() == pytest.approx(shift[same][valid[same]].sum().item())


def test_logistic_pair_is_log_two_at_the_reference_with_half_the_gradient(decisions):
    logp = decisions.require("logp_ref").clone().requires_grad_()
    score = scores(logp, decisions)
    chosen, rejected = preference_pairs(decisions, outcome(decisions))
    loss = logistic_pair(score[chosen], score[rejected], beta=0.4)
    torch.testing.assert_close(loss, torch.full_like(loss, 2.0).log())
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    again = scores(logp, decisions)
    (expected,) = torch.autograd.grad((-0.5 * 0.4 * (again[chosen] - again[rejected])).sum(), logp)
    torch.testing.assert_close(gradient, expected)
