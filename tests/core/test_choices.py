"""Tests of Clip-Cov weights at their boundary values, with hand-computed numbers."""

import math

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions
from robopolicy.core.selection import ClipCovariance, covariance


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def test_clip_cov_masks_only_unclipped_decisions_within_the_cost_range() -> None:
    """Clip-Cov: costs are 3, 3, 0 and 0; the ratio of 0.7 is clipped only at the negative advantage."""
    change = column(math.log(0.7), math.log(0.7), 0.0, 0.0)
    case = Decisions(column(-3.0, 3.0, 0.0, 0.0) - change)
    advantage = column(-1.0, 1.0, 0.0, 0.0)
    assert ClipCovariance(share=1.0)(case, advantage, change)[:, 0].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert ClipCovariance(share=1.0)(case, 2.0 * advantage, change).tolist() == [[1.0]] * 4  # 6 is above 5
    assert ClipCovariance(share=1.0)(case, 0.3 * advantage, change).tolist() == [[1.0]] * 4  # 0.9 is below 1


def test_clip_cov_ignores_masked_decisions_and_the_other_clipped_side() -> None:
    """All costs are 3; a ratio of 1.3 is clipped at the positive advantage only, and the last decision is masked."""
    change = column(math.log(1.3), math.log(1.3), 0.0, 0.0, 0.0)
    valid = torch.tensor([True, True, True, True, False]).unsqueeze(1)
    case = Decisions(column(3.0, -3.0, 3.0, -3.0, 3.0) - change, mask=valid)
    advantage = column(1.0, -1.0, 1.0, -1.0, 1.0)
    assert covariance(case.logp_old + change, advantage, case)[:4, 0].tolist() == [3.0] * 4
    assert ClipCovariance(share=1.0)(case, advantage, change)[:, 0].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0]
    torch.manual_seed(0)
    drawn = torch.stack([ClipCovariance(share=0.3)(case, advantage, change)[:, 0] for _ in range(60)])
    assert drawn.sum(1).tolist() == [4.0] * 60  # one of four valid decisions
    assert (drawn == 0).sum(0).tolist()[0::4] == [0, 0] and int((drawn == 0).sum(0)[1:4].min()) > 5
