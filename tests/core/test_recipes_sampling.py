"""Rollout recipes compared with their written formulas, value and gradient, and their limiting cases.

The tests in tests/rollout cover the rollouts (hints, trees, replays); the tests here cover the losses on their rows.
"""

import torch
from tabular import Tabular, check, check_recipe, recipe_of, tabular
from torch import Tensor
from torch.testing import assert_close

from robopolicy.core.decisions import Decisions
from robopolicy.core.recipe import Recipe


def gains(d: Decisions, penalty: float = 0.05, gamma: float = 0.9) -> Tensor:
    """Gain (N, T) of the unit of every decision, computed per unit; every row is a trajectory."""
    result = torch.zeros_like(d.logp_old)
    for row in range(len(d)):
        units = [u for u in (0, 1) if bool((d.valid()[row] & (d.require("unit")[row] == u)).any())]
        places = [d.valid()[row] & (d.require("unit")[row] == u) for u in units]
        value = [float(d.require("value")[row][place][0]) for place in places] + [0.0]
        reward = [float(d.require("reward")[row][place].sum()) for place in places]
        for i, place in enumerate(places):
            togo = sum(gamma**k * r for k, r in enumerate(reward[i:]))
            result[row][place] = value[i + 1] - value[i] - penalty + reward[i] + togo
    return result


def steps(d: Decisions) -> int:
    """Number of units that have decisions."""
    return sum(int((d.valid() & (d.require("unit") == unit)).any(1).sum()) for unit in (0, 1))


def test_digirl_imitates_only_steps_with_a_positive_gain():
    """DigiRL (Bai et al. 2024) imitates the steps with a positive gain."""

    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        losses = -(gains(d) > 0).double() * (case.logp() - d.logp_old) * d.valid()
        return losses.sum() / steps(d)

    check_recipe("digirl", formula)


def test_digirl_equals_behaviour_cloning_when_every_step_has_a_gain():
    """Limit of DigiRL (Bai et al. 2024)."""
    case = tabular()
    recipe = recipe_of("digirl", advantage_source={"name": "step_gain", "penalty": -100.0})
    check(recipe, case, lambda c: -((c.logp() - c.decisions.logp_old) * c.decisions.valid()).sum() / steps(c.decisions))


def test_step_gain_uses_the_next_unit_of_the_trajectory_in_another_row():
    """The next unit of a trajectory may be in another row."""
    logp = torch.zeros(3, 2, dtype=torch.float64)
    d = Decisions(
        logp,
        value=torch.tensor([[0.5, 0.5], [0.2, 0.2], [0.9, 0.9]], dtype=torch.float64),
        reward=torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64),
        unit=torch.tensor([[0, 0], [0, 0], [1, 1]]),
        trajectory=torch.tensor([4, 7, 4]),
    )
    found = Recipe.from_dict(
        {"title": "t", "advantage_source": {"name": "step_gain", "penalty": 0.0, "gamma": 0.5}}
    ).advantage(d)
    expected = [[0.9 - 0.5 + 0.0 + 0.5] * 2, [0.0 - 0.2 + 1.0 + 1.0] * 2, [0.0 - 0.9 + 1.0 + 1.0] * 2]
    assert_close(found, torch.tensor(expected, dtype=torch.float64))
