"""Tests of Plackett-Luce rankings as decisions: order frequencies, and a policy that learns to rank."""

from itertools import permutations

import torch
from tabular import recipe_of

from robopolicy.contrib.text_catalogue.plackett_luce import draw
from robopolicy.core.decisions import Decisions
from robopolicy.policies.composition.selection import log_probability


def test_sampled_orders_match_their_probabilities() -> None:
    scores = torch.tensor([[1.0, 0.0, -1.0]]).expand(20_000, 3)
    orders = draw(scores, torch.Generator().manual_seed(0))
    for order in permutations(range(3)):
        share = float((orders == torch.tensor(order)).all(1).float().mean())
        expected = float(log_probability(scores[:1], torch.tensor([order])).sum().exp())
        assert abs(share - expected) < 4 * (expected * (1 - expected) / 20_000) ** 0.5


def test_pg_rank_learns_to_rank_the_rewarded_item_first() -> None:
    """The reward is 1 / rank of item 2; training takes 60 updates with 4 rankings of 8 lists."""
    scores = torch.zeros(5, requires_grad=True)
    optimiser, generator = torch.optim.Adam([scores], lr=0.1), torch.Generator().manual_seed(0)
    recipe = recipe_of("pg_rank")
    for _ in range(60):
        orders = draw(scores.detach().expand(32, 5), generator)
        place = (orders == 2).long().argmax(1)
        reward = torch.zeros(32, 5)
        reward[:, -1] = 1.0 / (place + 1)
        group = torch.arange(32) // 4
        batch = Decisions(log_probability(scores.detach().expand(32, 5), orders), reward=reward, group=group)
        loss, info = recipe.loss(batch, recipe.advantage(batch), log_probability(scores.expand(32, 5), orders))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        recipe.observe(batch, info)
    assert int(scores.argmax()) == 2 and float(scores.detach().softmax(0)[2]) > 0.8


def test_cacovid_learns_which_tokens_to_keep() -> None:
    """CaCoVID: two of five tokens matter; sets are compared with each other, and equal rewards have no gradient.

    Source: Ma et al. 2026.
    """
    scores = torch.zeros(5, requires_grad=True)
    optimiser, generator = torch.optim.Adam([scores], lr=0.1), torch.Generator().manual_seed(0)
    recipe = recipe_of("cacovid")
    for _ in range(60):
        kept = draw(scores.detach().expand(16, 5), generator)[:, :2]
        answer = torch.zeros(16, 2)
        answer[:, -1] = ((kept == 1) | (kept == 3)).float().sum(1) / 2
        old = log_probability(scores.detach().expand(16, 5), kept)
        batch = Decisions(old, reward=answer, group=torch.arange(16) // 8)
        loss, _ = recipe.loss(batch, recipe.advantage(batch), log_probability(scores.expand(16, 5), kept))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert set(scores.topk(2).indices.tolist()) == {1, 3}
    everything = batch.with_fields(reward=torch.ones(16, 2))
    assert not recipe.advantage(everything).any()
