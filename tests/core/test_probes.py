"""Tests of pass@k against counting and closed forms."""

import itertools
import math

import pytest
import torch

from robopolicy.text.evaluation import pass_at_k


@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_equals_the_fraction_of_subsets_with_a_success(k: int) -> None:
    for count in range(7):
        marks = [1] * count + [0] * (6 - count)
        subsets = list(itertools.combinations(marks, k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(torch.tensor([count]), 6, k).item() == pytest.approx(expected)


def test_pass_at_k_stays_exact_for_many_samples_and_refuses_too_few() -> None:
    expected = 1 - math.exp(sum(math.log((1000 - 10 - i) / (1000 - i)) for i in range(500)))
    assert pass_at_k(torch.tensor([10]), 1000, 500).item() == pytest.approx(expected)
    assert pass_at_k(torch.tensor([1, 3]), torch.tensor([4, 8]), 2).tolist() == pytest.approx([0.5, 1 - 10 / 28])
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples per prompt, got 4"):
        pass_at_k(torch.tensor([1]), 4, 5)
