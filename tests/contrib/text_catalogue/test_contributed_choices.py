"""Tests of selectors, masks and weights at their limits, against hand-computed selections."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.testing import assert_close

from robopolicy.contrib.text_catalogue.masks import HighVarianceRows
from robopolicy.contrib.text_catalogue.objectives import OffPolicyRows
from robopolicy.contrib.text_catalogue.selectors import Extremes, positive
from robopolicy.core.decisions import Decisions


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def episodes(*reward: float, **fields: object) -> Decisions:
    """One group of rollouts with one decision each."""
    group = torch.zeros(len(reward), dtype=torch.long)
    return Decisions(torch.zeros(len(reward), 1), reward=column(*reward), group=group, **fields)  # pyright: ignore


def test_extremes_selects_best_worst_and_a_share_of_the_rest() -> None:
    """PF-PPO (Shen and Zhang 2024): the best and the worst rollout are not sampled again from the rest."""
    case, middle = episodes(0.1, 0.9, 0.5, 0.4, 0.6), set[int]()
    for seed in range(20):
        rows = set(Extremes(rest=1 / 3)(case, torch.Generator().manual_seed(seed)).tolist())
        assert len(rows) == 3 and {0, 1} <= rows
        middle |= rows - {0, 1}
    assert middle == {2, 3, 4}


def test_positive_selects_at_least_one_rollout() -> None:
    case = episodes(1.0, 1.0, 0.0, extra={"mean_ref": torch.full((3,), 0.5)})
    assert positive(case, torch.Generator().manual_seed(0), share=0.1).tolist() in ([0], [1])


def test_a_small_share_keeps_the_best_and_the_worst() -> None:
    """D3S (Wang et al. 2025)."""
    kept = HighVarianceRows(0.1)(episodes(0.0, 0.0, 0.0, 0.0), column(0.3, -2.0, 0.1, 1.0), torch.zeros(4, 1))
    assert kept[:, 0].tolist() == [False, True, False, True]


def test_a_density_above_one_is_clipped_to_one() -> None:
    """AMPO (Yuan et al. 2025): teacher rows of a robot."""
    case = episodes(0.0, 0.0, source=torch.tensor([2, 0]))
    loss, _ = OffPolicyRows(source=2, shape=0.1)(case, column(1.0, 1.0), column(3.0, 3.0))
    assert_close(loss, torch.tensor(-0.5 / 1.1, dtype=torch.float64))  # a mean over both kinds of rows
