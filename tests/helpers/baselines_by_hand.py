"""Hand-written baselines of recipes."""

import torch
from tabular import Tabular, rewards
from torch import Tensor


def groups(case: Tabular) -> Tensor:
    return case.decisions.require("group")


def valid(case: Tabular) -> Tensor:
    return case.decisions.valid()


def gae(case: Tabular, gamma: float, lam: float) -> Tensor:
    """Generalised advantages over the decisions of each row, by a loop."""
    result = torch.zeros_like(case.decisions.logp_old)
    for row, keep in enumerate(valid(case)):
        places = torch.nonzero(keep).flatten().tolist()
        running, after = 0.0, 0.0
        for t in reversed(places):
            value = float(case.decisions.require("value")[row, t])
            running = float(case.decisions.require("reward")[row, t]) + gamma * after - value + gamma * lam * running
            after = value
            result[row, t] = running
    return result


def left_out(case: Tabular) -> Tensor:
    """Reward minus the mean reward of the other rows of the group, by a loop."""
    reward, group = rewards(case), groups(case)
    result = torch.zeros_like(reward)
    for row in range(len(reward)):
        others = (group == group[row]) & (torch.arange(len(reward)) != row)
        result[row] = reward[row] - reward[others].mean()
    return result


def to_go(case: Tabular) -> Tensor:
    """Reward-to-go of each decision, by a loop."""
    reward, mask = case.decisions.require("reward") * valid(case), valid(case)
    return torch.stack([reward[:, t:].sum(1) for t in range(reward.shape[1])], 1) * mask
