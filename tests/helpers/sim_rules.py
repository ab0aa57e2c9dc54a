"""Checks for the simulators of all tasks."""

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, make_sim


def check_refuses_actions_that_are_no_numbers(task: str) -> None:
    """Actions of another shape and non-finite actions are refused."""
    sim = make_sim(task, SimOptions(num_envs=2))
    sim.reset(0)
    action = torch.zeros(2, sim.spec.action_dim)
    with pytest.raises(UserError, match=r"Expected actions of shape \(2, "):
        sim.step(action[:1])
    action[1, 0] = np.nan
    with pytest.raises(UserError, match="An action is NaN or infinite"):
        sim.step(action)
