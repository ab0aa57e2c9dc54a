"""Tests of the scale of replayed rewards against hand-computed returns."""

import pytest
import torch
from torch import Tensor

from robopolicy.data.return_scale import ReturnScale


def scale(bound: float = 5.0, envs: int = 2) -> ReturnScale:
    return ReturnScale(bound, 0.5, envs, torch.device("cpu"))


def flags(*values: bool) -> Tensor:
    return torch.tensor(values)


def test_rewards_are_divided_by_the_deviation_of_running_returns() -> None:
    found = scale()
    found.observe(torch.tensor([2.0, 4.0]), flags(False, True), flags(True, True))
    found.observe(torch.tensor([1.0, 1.0]), flags(False, False), flags(True, True))
    returns = torch.tensor([2.0, 4.0, 2.0, 1.0])  # 1 + 0.5 * 2; the second episode is new
    assert float(found.factor()) == pytest.approx(1 / float(returns.std(correction=0)), rel=1e-6)


def test_scaled_returns_stay_within_the_bound() -> None:
    found = scale(bound=0.5)
    found.observe(torch.tensor([-3.0, 1.0]), flags(False, False), flags(True, True))
    assert float(found.factor()) == pytest.approx(0.5 / 3)
    found.observe(torch.tensor([-3.0, 1.0]), flags(False, False), flags(True, True))
    assert float(found.factor()) == pytest.approx(0.5 / 4.5)


def test_inactive_environments_have_no_effect() -> None:
    found, alone = scale(), scale(envs=1)
    for reward in (1.0, 5.0, -2.0):
        found.observe(torch.tensor([reward, 100.0]), flags(False, True), flags(True, False))
        alone.observe(torch.tensor([reward]), flags(False), flags(True))
    assert float(found.factor()) == float(alone.factor())


def test_the_state_continues_and_new_episodes_start_at_zero() -> None:
    found = scale()
    found.observe(torch.tensor([2.0, 4.0]), flags(False, False), flags(True, True))
    other = scale()
    other.load_state_dict(found.state_dict())
    for each in (found, other):
        each.observe(torch.tensor([1.0, 0.0]), flags(False, False), flags(True, True))
    assert float(found.factor()) == float(other.factor())
    other.reset_episodes()
    other.observe(torch.tensor([7.0, 0.0]), flags(False, False), flags(True, True))
    assert float(other.state_dict()["moments"][3]) == 7.0
