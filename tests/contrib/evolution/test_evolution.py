"""Tests of gradient-free search: search spaces, rank invariance, exact resumption, and a robot that learns."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from robopolicy.contrib.evolution.evolution import CMAES, AllOf, Archive, DeepGA, RowScales, SingularValues, evolve
from robopolicy.sim.registry import SimOptions, make_sim

BOXES = {"deep_ga": DeepGA, "cmaes": CMAES, "archive": Archive}
RANKED = ("deep_ga", "cmaes")  # searches that use only fitness ranks


def bowl(vectors: torch.Tensor) -> torch.Tensor:
    """Fitness (P,), highest at (1, -1, 0, ...)."""
    target = torch.zeros(vectors.shape[1], dtype=vectors.dtype)
    target[:2] = torch.tensor([1.0, -1.0])
    return -((vectors - target) ** 2).sum(1)


def run(box, generations: int, fitness=bowl) -> torch.Tensor:
    for _ in range(generations):
        box.tell(fitness(box.ask()))
    return box.best()


def make(name: str, size: int = 4):
    settings = {"deep_ga": {"sigma": 0.3, "population": 32, "parents": 4}, "cmaes": {"sigma": 0.3}}
    settings["archive"] = {"sigma": 0.3, "distance": 0.2, "population": 32}
    return BOXES[name](torch.zeros(size), **settings[name])


@pytest.mark.parametrize("name", BOXES)
def test_searches_reach_the_optimum_of_a_quadratic(name):
    best = run(make(name), 40)
    assert float(bowl(best[None])) > -0.15


@pytest.mark.parametrize("name", RANKED)
def test_ranked_searches_are_invariant_to_monotone_fitness_transforms(name):
    """Limit of ESSA (Korotyshova et al. 2025)."""
    assert_close(run(make(name), 6), run(make(name), 6, lambda vectors: torch.exp(3.0 * bowl(vectors)) - 7.0))


@pytest.mark.parametrize("name", BOXES)
def test_searches_resume_exactly(name):
    box, again = make(name), make(name)
    run(box, 5)
    again.load_state_dict(box.state_dict())
    assert torch.equal(run(box, 4), run(again, 4))


@pytest.mark.parametrize("name", BOXES)
def test_a_nan_fitness_ranks_last(name):
    def broken(vectors):
        fitness = bowl(vectors)
        return torch.where(vectors[:, 0] < 0, torch.nan, fitness)

    assert float(run(make(name), 10, broken)[0]) > 0


def test_archive_candidates_keep_a_minimum_distance_and_average_noisy_trials():
    """POLCA: candidates keep a minimum distance, and the best one has the highest mean over noisy trials."""
    box, generator = make("archive", size=2), torch.Generator().manual_seed(0)
    for _ in range(60):
        asked = box.ask()
        box.tell(bowl(asked) + torch.randn(len(asked), generator=generator))
    gaps = torch.cdist(box.candidates, box.candidates) + 9.0 * torch.eye(len(box.candidates))
    assert float(gaps.min()) >= 0.2 and float(box.trials.sum()) == 60 * 32
    assert float(bowl(box.best()[None])) > -0.5  # from -2, with noise of standard deviation 1 on every trial


def test_decoding_the_seeds_of_a_genome_returns_the_individual():
    """Such et al. 2017: decoding the seeds returns the individual; genome length does not depend on its size."""
    box = DeepGA(torch.zeros(1000), population=6, parents=2, seed=3)
    for _ in range(4):
        asked = box.ask()
        for vector, genome in zip(asked, box._asked, strict=True):
            assert torch.equal(vector, box.decode(genome))
        box.tell(torch.arange(6.0))
    assert sum(len(genome) for genome in box.state_dict()["best"]) <= 8


def test_deep_ga_best_fitness_never_decreases():
    box = DeepGA(torch.zeros(3), sigma=1.0, population=8, parents=3)
    heights = []
    for _ in range(10):
        fitness = bowl(box.ask())
        box.tell(fitness)
        heights.append(float(fitness.max()))
    assert heights == sorted(heights)


def test_singular_value_space_has_one_parameter_per_rank():
    """Limit of ESSA: only singular values change, and writing the current values changes nothing."""
    torch.manual_seed(0)
    down, up = nn.Parameter(torch.randn(3, 8)), nn.Parameter(torch.randn(8, 3))
    thin = nn.Parameter(torch.randn(6, 1) @ torch.randn(1, 6))
    before = [matrix.detach().clone() for matrix in (down, up, thin)]
    space = SingularValues([down, up, thin])
    assert space.read().shape == (3 + 3 + 1,)
    space.write(space.read())
    for matrix, was in zip((down, up, thin), before, strict=True):
        assert_close(matrix.detach(), was)
    space.write(2.0 * space.read())
    assert_close(down.detach(), 2.0 * before[0])
    space.write(torch.arange(7.0))
    assert_close(torch.linalg.svdvals(down.detach()), torch.tensor([2.0, 1.0, 0.0]), atol=1e-5, rtol=0)


def test_search_spaces_change_only_their_own_parameters():
    net = nn.Linear(3, 2)
    weight, bias = net.weight.detach().clone(), net.bias.detach().clone()
    scales = RowScales([net.weight])
    scales.write(torch.tensor([2.0, -1.0]))
    assert_close(net.weight.detach(), weight * torch.tensor([[2.0], [-1.0]]))
    scales.write(scales.read())
    assert_close(net.weight.detach(), weight)
    everything = AllOf([net.weight])
    everything.write(everything.read() + 1.0)
    assert_close(net.weight.detach(), weight + 1.0)
    assert_close(net.bias.detach(), bias)


def controller() -> nn.Sequential:
    """Point-mass controller whose last layer pushes away from the goal along y and too weakly along x."""
    policy = nn.Sequential(nn.Linear(6, 2, bias=False), nn.Linear(2, 2, bias=False))
    first, last = policy[0].weight, policy[1].weight
    with torch.no_grad():
        first.copy_(torch.cat([-3.0 * torch.eye(2), -1.5 * torch.eye(2), 3.0 * torch.eye(2)], 1))
        last.copy_(torch.tensor([[0.4, 0.0], [0.0, -0.4]]))
    return policy


@torch.no_grad()
def mean_return(policy: nn.Module, episodes: int = 16) -> float:
    """Mean return of point-mass episodes with fixed seeds."""
    sim = make_sim("toy/point_mass", SimOptions(num_envs=episodes, reward="shaped"))
    state, total, running = sim.reset(0)["state"], torch.zeros(episodes), torch.ones(episodes, dtype=torch.bool)
    while bool(running.any()):
        step = sim.step(policy(state).clamp(-1, 1))
        total += torch.where(running, step.reward, 0.0)
        running &= ~(step.terminated | step.truncated)
        state = step.obs["state"]
    return float(total.mean())


@pytest.mark.parametrize("name", RANKED)
def test_searching_last_layer_scales_improves_the_robot_return(name):
    """R (9.01): the search over adapters of a text policy, on a robot that initially moves away from its goal."""
    policy = controller()
    space, before = RowScales([policy[1].weight]), mean_return(policy)
    settings = {"deep_ga": {"sigma": 0.8, "population": 12, "parents": 3}, "cmaes": {"sigma": 0.8, "population": 12}}
    evolve(BOXES[name](space.read(), **settings[name]), space, lambda: mean_return(policy), generations=8)
    assert float(policy[1].weight[1, 1].detach()) > 0, "it now drives towards it"
    assert mean_return(policy) > before + 10.0
