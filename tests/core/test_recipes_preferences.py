"""Preference recipes compared with their written formulas, and the limits in which they equal simpler methods."""

import torch
from formulas import pairs, relative, to_reference
from tabular import Tabular, check_recipe, recipe_of, rewards, tabular
from torch import Tensor
from torch.nn.functional import logsigmoid


def mean(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).mean()


def test_dpo_loss_and_gradient_equal_the_written_formula() -> None:
    def formula(case: Tabular) -> Tensor:
        r = to_reference(case).sum(1)
        return mean([-logsigmoid(0.1 * (r[i] - r[j])) for i, j in pairs(case, ordered=True)])

    check_recipe("dpo", formula)


def test_kto() -> None:
    def formula(case: Tabular) -> Tensor:
        r, good = to_reference(case).sum(1), rewards(case) > 0
        point = r.mean().detach().clamp(min=0)
        return torch.where(good, 1 - torch.sigmoid(0.1 * (r - point)), 1 - torch.sigmoid(0.1 * (point - r))).mean()

    check_recipe("kto", formula)


def test_relative_advantages_do_not_change_pairs() -> None:
    """Pairs depend only on the order within a group, which a baseline and a scale preserve."""
    case = tabular()
    loss, _ = recipe_of("dpo").loss(case.decisions, relative(case)[:, None], case.logp())
    plain, _ = recipe_of("dpo").loss(case.decisions, rewards(case)[:, None], case.logp())
    torch.testing.assert_close(loss, plain)
