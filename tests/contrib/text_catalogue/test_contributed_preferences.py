"""Tests of pairwise objectives: gradients, values, and learning from noisy pairs."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.pair_objectives import squared_difference
from robopolicy.core.decisions import Decisions
from robopolicy.core.objectives import logistic_pair
from robopolicy.core.recipe import Recipe
from robopolicy.recipe_files import read_recipe


def test_losses_pass_gradcheck():
    chosen, rejected = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: logistic_pair(a, b, beta=0.5, margin=0.1), (chosen, rejected))
    assert torch.autograd.gradcheck(lambda a, b: squared_difference(a, b, 0.3), (chosen, rejected))


def test_squared_difference_vanishes_at_its_target():
    assert squared_difference(torch.tensor([1.0]), torch.tensor([0.4]), 0.6).item() == pytest.approx(0.0, abs=1e-12)


def learned_from_pairs(seed: int, learn: str, pairs: int = 150, length: int = 8) -> float:
    """Mean advantage of a linear controller trained on segment pairs with noisy preferences.

    The best action is -0.5 state; demonstrations have a constant and a per-segment bias, and the advantage is the
    negative squared distance.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    state, count = draw(2 * pairs, length, 2), 2 * pairs
    action = -0.5 * state + 0.3 + 0.3 * draw(count, 1, 2) + 0.3 * draw(count, length, 2)
    scores = -(action + 0.5 * state).square().sum((1, 2)) + 0.5 * draw(count)
    preferred = (scores.view(pairs, 2) == scores.view(pairs, 2).amax(1, keepdim=True)).flatten()
    reward = torch.zeros(count, length, dtype=torch.float64)
    reward[:, -1] = preferred.double()
    segments = Decisions(torch.zeros_like(reward), reward=reward, group=torch.arange(pairs).repeat_interleave(2))
    recipe = Recipe.from_dict(read_recipe("cpl"))
    weight = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], lr=0.03)
    for _ in range(120):
        logp = -(state @ weight + bias - action).square().sum(2)
        if learn == "contrast":
            loss, _ = recipe.loss(segments, recipe.advantage(segments), logp)
        else:
            loss = -(logp[preferred] if learn == "preferred" else logp).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    new = draw(1000, 2)
    return -float((new @ weight + bias + 0.5 * new).square().sum(1).mean().detach())


@pytest.mark.parametrize("seed", range(3))
def test_contrastive_learning_beats_imitation_of_all_or_of_preferred_segments(seed):
    everything, preferred, contrast = (learned_from_pairs(seed, by) for by in ("all", "preferred", "contrast"))
    assert everything < -0.13 and everything < preferred - 0.05 and preferred < contrast - 0.03
    assert contrast > -0.06
