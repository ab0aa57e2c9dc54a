"""Tests of novelty, Pareto fronts and emitters against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from robopolicy.contrib.quality_diversity.emitters import TRIAL, Emitter, mutated
from robopolicy.contrib.quality_diversity.individuals import EvaluatedPolicies, flatten_obs, view_dim
from robopolicy.contrib.quality_diversity.novelty import crowding, novelty, pareto_ranks, select_diverse


def evaluated(*fitness: float) -> EvaluatedPolicies:
    returns = torch.tensor(fitness, dtype=torch.float64)
    weights = torch.arange(len(fitness)).float()[:, None].expand(-1, 4)
    return EvaluatedPolicies(weights, returns, torch.zeros(len(fitness), 2, 3))


def test_novelty_is_the_mean_distance_to_the_nearest_others() -> None:
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert novelty(line, line, 2).tolist() == [2.0, 1.5, 2.5, 5.0]
    assert novelty(line, line, 15).tolist() == pytest.approx([11 / 3, 3.0, 3.0, 17 / 3])
    assert novelty(torch.tensor([[5.0]]), line, 2, within=False).tolist() == [2.0]
    assert novelty(line[:1], line[:1], 3).tolist() == [math.inf]


def test_pareto_ranks_count_the_dominating_fronts() -> None:
    first = torch.tensor([3.0, 1.0, 2.0, 0.0, 3.0])
    second = torch.tensor([1.0, 3.0, 2.0, 0.0, 0.5])
    assert pareto_ranks(first, second).tolist() == [0, 0, 0, 2, 1]
    same = torch.ones(3)
    assert pareto_ranks(same, same).tolist() == [0, 0, 0]


def test_selection_prefers_large_crowding_distances() -> None:
    first, second = torch.tensor([0.0, 1.0, 1.2, 4.0]), torch.tensor([4.0, 3.0, 2.8, 0.0])
    room = crowding(first, second)
    assert room.tolist() == pytest.approx([math.inf, 1.2 / 4 * 2, 3.0 / 4 * 2, math.inf])
    assert sorted(select_diverse(first, second, 3).tolist()) == [0, 2, 3]
    worse = torch.cat([first - 9, first]), torch.cat([second - 9, second])
    assert sorted(select_diverse(*worse, 5).tolist())[1:] == [4, 5, 6, 7]


def test_mutants_have_the_requested_step_size_and_stay_in_bounds() -> None:
    generator = torch.Generator().manual_seed(0)
    mutants = mutated(torch.zeros(500, 20), 0.3, 5.0, generator)
    assert float(mutants.std()) == pytest.approx(0.3, rel=0.03)
    assert float(mutated(torch.zeros(500, 20), 3.0, 1.0, generator).abs().max()) == 1.0


def test_an_emitter_keeps_the_best_members_and_measures_its_improvement() -> None:
    generator = torch.Generator().manual_seed(0)
    emitter = Emitter(evaluated(1.0), sigma=0.1, size=2, limit=5.0)
    assert emitter.ask(generator).shape == (2, 4) and emitter.count == 2
    emitter.tell(evaluated(1.0, 0.0))
    assert emitter.ask(generator).shape == (4, 4)
    for gain in range(1, TRIAL):
        assert not emitter.is_evaluated
        emitter.tell(evaluated(1.0 + gain, 0.0, 0.0, 0.0))
    assert emitter.is_evaluated and emitter.just_evaluated
    assert emitter.members.fitness.tolist() == [6.0, 5.0]
    emitter.rate()  # means of the generations: 0.5, 1.5, 2.5, 3.5, 4.5, 5.5
    assert emitter.improvement == pytest.approx(4.5 - 1.5)


def test_an_emitter_stores_its_first_best_member_and_then_only_better_ones() -> None:
    emitter = Emitter(evaluated(1.0), sigma=0.1, size=3, limit=5.0)
    emitter.tell(evaluated(0.0, -1.0, 0.0))
    assert not len(emitter.fresh(0.0))
    emitter.tell(evaluated(2.0, 3.0))
    assert emitter.fresh(0.0).fitness.tolist() == [3.0]
    emitter.tell(evaluated(5.0, 4.0, 1.0))
    assert emitter.fresh(0.0).fitness.tolist() == [5.0, 4.0]
    assert not len(emitter.fresh(0.0))


def test_an_emitter_is_stale_without_improvement() -> None:
    emitter = Emitter(evaluated(1.0), sigma=0.1, size=2, limit=5.0)
    for generation in range(60):
        emitter.tell(evaluated(float(generation), float(generation)))
    assert not emitter.stale(40) and not emitter.stale(100)
    for _ in range(40):
        emitter.tell(evaluated(0.0))
    assert emitter.stale(40)


def test_an_emitter_stores_the_most_novel_members() -> None:
    emitter = Emitter(evaluated(1.0), sigma=0.1, size=2, limit=5.0)
    emitter.record_novel(evaluated(1.0, 2.0), torch.tensor([0.5, 0.2]))
    emitter.record_novel(evaluated(3.0, 4.0), torch.tensor([0.4, 0.9]))
    assert emitter.novel.fitness.tolist() == [1.0, 2.0, 4.0] and emitter.most_novel == pytest.approx(0.9)


def test_views_flatten_all_observations() -> None:
    obs = {"state": torch.ones(2, 5), "image.front": torch.full((2, 3, 64, 48), 255, dtype=torch.uint8)}
    views = flatten_obs(obs)
    assert views.shape == (2, 3 * 16 * 16 + 5) and bool((views == 1.0).all())
    assert view_dim({"state": (5,), "image.front": (3, 64, 48)}) == views.shape[1]
