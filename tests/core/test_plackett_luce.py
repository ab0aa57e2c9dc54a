"""Tests of the log-probability of rankings: sum over all orders, limiting cases, and partial rankings."""

from itertools import permutations

import torch

from robopolicy.policies.composition.selection import log_probability


def test_the_probabilities_of_all_orders_sum_to_one() -> None:
    scores = torch.randn(1, 4, dtype=torch.float64)
    orders = torch.tensor(list(permutations(range(4))))
    total = log_probability(scores.expand(24, 4), orders).sum(1).exp().sum()
    torch.testing.assert_close(total, torch.ones((), dtype=torch.float64))


def test_one_item_has_probability_one_and_two_items_a_logistic_probability() -> None:
    assert float(log_probability(torch.randn(1, 1), torch.zeros(1, 1, dtype=torch.long))) == 0.0
    scores = torch.tensor([[0.3, -0.9]], dtype=torch.float64)
    first = log_probability(scores, torch.tensor([[0, 1]])).sum()
    torch.testing.assert_close(first, torch.nn.functional.logsigmoid(scores[0, 0] - scores[0, 1]))


def test_partial_ranking_probability_equals_the_sum_over_its_completions() -> None:
    scores = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    orders = [list(order) for order in permutations(range(4)) if order[:2] == (2, 0)]
    whole = log_probability(scores.expand(2, 4), torch.tensor(orders)).sum(1).exp().sum()
    torch.testing.assert_close(log_probability(scores, torch.tensor([[2, 0]])).sum().exp(), whole)
