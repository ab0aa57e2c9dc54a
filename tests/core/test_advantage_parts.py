"""Tests of advantage parts at their boundary values, with hand-computed numbers."""

import math

import pytest
import torch
from torch import Tensor

from robopolicy.core.advantage_sources import Critic, StepGain
from robopolicy.core.decisions import Decisions
from robopolicy.core.objectives import GeometricMean, KahnemanTversky


def episodes(reward: list[float], group: list[int], length: int = 1, **fields: object) -> Decisions:
    """Rollouts of one row each, with the outcome at the first decision."""
    placed = torch.zeros(len(reward), length, dtype=torch.float64)
    placed[:, 0] = torch.tensor(reward)
    return Decisions(torch.zeros_like(placed), reward=placed, group=torch.tensor(group), **fields)  # pyright: ignore


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_step_critic_target_is_whether_reward_follows() -> None:
    """DigiRL (Bai et al. 2024)."""
    reward = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    case = Decisions(torch.zeros_like(reward), reward=reward, unit=torch.arange(3).expand(2, 3))
    assert StepGain().targets(case)[0].tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]


def test_log_ratios_have_separate_lower_and_upper_bounds() -> None:
    """GMPO clips only the side on which the objective could grow."""
    case = episodes([0.0, 0.0], [0, 0])
    for change, advantage, ratio in ((-0.3, -1.0, -0.1), (-0.3, 1.0, -0.3), (0.5, 1.0, 0.4), (0.5, -1.0, 0.5)):
        logp, given = torch.full((2, 1), change, dtype=torch.float64), torch.full((2, 1), advantage).double()
        loss, _ = GeometricMean(low=0.1, high=0.4)(case, given, logp)
        assert float(loss) == pytest.approx(-advantage * math.exp(ratio))


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_masked_entries_give_the_critic_no_gradient(clip: float) -> None:
    """A masked entry may hold any value, including NaN."""
    off = double(0.0, math.nan)[None]
    value = double(0.5, 0.5)[None].requires_grad_()
    case = Decisions(torch.zeros(1, 2), mask=torch.tensor([[True, False]]), value=off)
    loss = Critic(clip=clip).loss(value, case, off, case.valid())
    (gradient,) = torch.autograd.grad(loss, value)
    assert loss.item() == 0.25 and gradient.tolist() == [[1.0, 0.0]]


def test_value_clip_uses_the_larger_squared_error() -> None:
    value, target = double(1.0, -1.0, 0.1, 1.0)[None], double(2.0, 2.0, 2.0, -1.0)[None]
    case = Decisions(torch.zeros(1, 4), value=torch.zeros(1, 4, dtype=torch.float64))
    loss = Critic(clip=0.2).loss(value, case, target, case.valid())
    # the larger of (1 - 2)^2 and (0.2 - 2)^2, (-1 - 2)^2 and (-0.2 - 2)^2, (0.1 - 2)^2 twice, (1 + 1)^2 and (0.2 + 1)^2
    assert float(loss) == pytest.approx((3.24 + 9.0 + 3.61 + 4.0) / 4)


def test_good_and_bad_trajectories_have_separate_weights() -> None:
    """KTO: log-ratios 1 and -0.4 have the mean 0.3, and each is 0.7 away from it on its own side."""
    case = episodes([1.0, 0.0], [0, 0], logp_ref=torch.zeros(2, 1, dtype=torch.float64))
    part = KahnemanTversky(beta=2.0, desirable=3.0, undesirable=5.0)
    loss, info = part(case, double(1.0, -1.0)[:, None], double(1.0, -0.4)[:, None])
    assert float(loss) == pytest.approx((3.0 + 5.0) / 2 / (1 + math.exp(2.0 * 0.7)))
    assert float(info["kl_ref"]) == pytest.approx(0.3)
