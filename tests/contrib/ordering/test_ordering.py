"""Tests of visit ordering: exact paths, invariances of the network, and imitation of optimal orders."""

from __future__ import annotations

import json
from itertools import permutations

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.contrib.ordering.exact import nearest_orders, path_length, shortest_orders
from robopolicy.contrib.ordering.network import VisitConfig, VisitPolicy, load_visits, save_visits
from robopolicy.contrib.ordering.visits import optimal_steps, order_visits, ratios, train_visits
from robopolicy.errors import UserError


def instances(rows=6, count=6, dim=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(rows, count, dim, generator=generator)
    return points, torch.rand(rows, dim, generator=generator), torch.rand(rows, dim, generator=generator)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return VisitPolicy(VisitConfig(width=16, layers=2, heads=2)).eval()


@pytest.mark.parametrize("ends", [False, True])
def test_the_exact_order_is_the_shortest_of_all_permutations(ends):
    points, start, last = instances()
    end = last if ends else None
    every = torch.tensor(list(permutations(range(6))))
    for row in range(len(points)):
        copies = [v[row : row + 1].expand(len(every), *v.shape[1:]) for v in (points, start, last)]
        lengths = path_length(copies[0], every, copies[1], copies[2] if ends else None)
        found = order_visits(points[row], start[row], None if end is None else end[row])
        assert torch.equal(found, every[lengths.argmin()])


def test_path_lengths_and_nearest_neighbours_on_a_line():
    points, start = torch.tensor([[[3.0], [1.0], [-2.0]]]), torch.zeros(1, 1)
    assert nearest_orders(points, start).tolist() == [[1, 0, 2]]
    assert path_length(points, torch.tensor([[1, 0, 2]]), start).tolist() == [8.0]
    assert shortest_orders(points, start).tolist() == [[2, 1, 0]]
    assert shortest_orders(points, start, torch.full((1, 1), -2.0)).tolist() == [[1, 0, 2]]
    assert path_length(points, torch.tensor([[1, 0, 2]]), start, torch.full((1, 1), -2.0)).tolist() == [8.0]


def test_the_choice_does_not_depend_on_the_order_of_the_points(network):
    points, start, end = instances(count=9)
    shuffled = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    for last in (None, end):
        scores = network(points, start, last)
        assert torch.allclose(network(points[:, shuffled], start, last), scores[:, shuffled], atol=1e-5)


def test_the_choice_does_not_depend_on_visited_points(network):
    points, start, end = instances(rows=1, count=7)
    order = order_visits(points, start, end, policy=network)[0]
    for done in range(1, 7):  # a path that starts there, with only the remaining points
        left = order[done:].sort().values
        rest = order_visits(points[:, left], points[:, order[done - 1]], end, policy=network)[0]
        assert torch.equal(left[rest], order[done:])


def test_the_choice_does_not_depend_on_translation_and_scale(network):
    points, start, end = instances(count=9)
    scores = network(points, start, end)
    moved = [40 * value + torch.tensor([3.0, -7.0]) for value in (points, start, end)]
    assert torch.allclose(network(*moved), scores, atol=1e-4)


def test_every_point_is_visited_once_and_batch_rows_are_independent(network):
    points, start, _ = instances(rows=5, count=11)
    order = order_visits(points, start, policy=network)
    assert torch.equal(order.sort(1).values, torch.arange(11).expand(5, -1))
    assert all(torch.equal(order_visits(points[i], start[i], policy=network), order[i]) for i in range(5))
    assert order_visits(points[:, :0], start, policy=network).shape == (5, 0)
    assert order_visits(points[0, :0], start[0]).shape == (0,)


@pytest.mark.parametrize("ends", [False, True])
def test_the_rest_of_a_shortest_path_is_a_shortest_path(ends):
    points, start, last = instances(rows=20)
    end = last if ends else None
    order = shortest_orders(points, start, end)
    for done in range(5):
        rest, here, following = optimal_steps(points, order, start, done)
        assert torch.equal(shortest_orders(rest, here, end)[:, 0], following)


def test_imitation_beats_nearest_neighbour_also_with_more_points_than_trained():
    policy = train_visits(VisitConfig(width=32, layers=2), updates=400, visits=6, batch=96, lr=2e-3)
    near, best = ratios(policy, 6)
    assert near < 0.97 and best is not None and best < 1.04
    assert ratios(policy, 14)[0] < 0.98


def test_training_is_reproducible(tmp_path):
    first, second = (train_visits(VisitConfig(width=8, layers=1), updates=3, visits=4, batch=8) for _ in range(2))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    save_visits(first, tmp_path / "visits")
    points, start, end = instances()
    assert torch.equal(load_visits(tmp_path / "visits")(points, start, end), first(points, start, end))


def test_the_command_trains_and_reports(tmp_path, capsys):
    sizes = ["--visits", "5", "--updates", "20", "--width", "16", "--layers", "1"]
    assert main(["visits", *sizes, "--out", str(tmp_path / "visits"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ratios"]
    assert found.keys() == {"5", "20", "50"}
    assert found["5"]["over_shortest"] is not None and found["20"]["over_shortest"] is None
    assert load_visits(tmp_path / "visits").config.width == 16
    with pytest.raises(SystemExit):
        main(["visits", "--help"])
    assert "nearest neighbour heuristic (below 1 is better)" in " ".join(capsys.readouterr().out.split())


def test_invalid_input_is_refused(network, tmp_path):
    points, start, _ = instances(rows=1, count=13)
    with pytest.raises(UserError, match="13 visits are too many"):
        order_visits(points, start)
    with pytest.raises(UserError, match=r"start and end \(d,\) or \(B, d\), got"):
        order_visits(points, start[0])
    with pytest.raises(UserError, match="finite coordinates"):
        order_visits(points * torch.nan, start, policy=network)
    with pytest.raises(UserError, match="points of 2 coordinates, got 3"):
        order_visits(torch.rand(1, 4, 3), torch.rand(1, 3), policy=network)
    with pytest.raises(UserError, match="2 to 12 visits"):
        train_visits(VisitConfig(), visits=13)
    with pytest.raises(UserError, match="at least 1"):
        VisitConfig(layers=0)
    with pytest.raises(UserError, match="is not a network for visits"):
        load_visits(tmp_path)
