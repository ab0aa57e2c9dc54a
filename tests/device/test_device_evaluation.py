"""Tests of evaluation on the simulated device: the CPU's scores, with two waits per decision beside the simulator."""

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from budgets import check_budget

from robopolicy.errors import UserError
from robopolicy.evaluation import actors
from robopolicy.evaluation.actors import NoisyActor, PolicyActor, RandomActor
from robopolicy.evaluation.harness import run_episodes
from robopolicy.evaluation.result import EvalResult
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator, row_generator
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim

simulated = pytest.importorskip("simulated", exc_type=ImportError)
ENVS, STEPS = 4096, 40  # `toy/point_mass` truncates its episodes after 40 steps


def opened(num_envs: int, device: str = simulated.NAME) -> VectorSim:
    return make_sim("toy/point_mass", SimOptions(num_envs, device=device, reward="shaped"))


def made(
    name: str = "gaussian", chunk: tuple[int, int] = (1, 1), device: str = simulated.NAME, **settings: Any
) -> Policy:
    spec = opened(1, "cpu").spec
    observation = {key: tuple(entry.shape) for key, entry in spec.observation.items()}
    torch.manual_seed(0)
    policy_class = POLICIES[name]
    config = policy_class.config_class(**settings)
    return policy_class(config, PolicySpec(observation, spec.action_dim, *chunk)).to(device)


def check_same(first: EvalResult, second: EvalResult) -> None:
    assert len(set(first.returns)) > 1  # the comparison is not trivial
    np.testing.assert_allclose(first.returns, second.returns, rtol=1e-4)
    assert first.success is not None and second.success is not None
    assert np.array_equal(first.success, second.success)
    assert np.array_equal(first.lengths, second.lengths) and first.cost.decisions == second.cost.decisions


# The section `evaluation` counts one control step; before, one of 64 environments had 154 launches and 27 waits. The
# simulator has 32 launches and a wait of them.
@pytest.mark.parametrize(("name", "chunk"), [("gaussian", (1, 1)), ("flow", (4, 4))])
def test_a_step_of_thousands_of_environments_waits_three_times_at_most(name: str, chunk: tuple[int, int]) -> None:
    policy, sim = made(name, chunk), opened(ENVS)
    with simulated.record() as found:
        result = run_episodes(policy, sim, range(ENVS))
    assert result.lengths.max() == STEPS and result.cost.policy_calls == STEPS // chunk[1]
    waits = (found.waits - 3) / STEPS  # three at start and end
    assert waits <= 3, found.places()
    check_budget("evaluation", name, found.launches / STEPS, waits, found)


@pytest.mark.parametrize("seeds", [range(50, 70), [61, 50, 55]], ids=["consecutive", "scattered"])
def test_scores_on_a_device_are_those_of_the_cpu(seeds: range | list[int]) -> None:
    count = 7 if isinstance(seeds, range) else len(seeds)
    on_device = run_episodes(made(), opened(count), seeds)
    on_cpu = run_episodes(made(device="cpu"), opened(count, "cpu"), seeds)
    check_same(on_device, on_cpu)


def test_a_policy_on_a_device_plays_a_simulator_on_the_cpu() -> None:
    check_same(*(run_episodes(made(device=name), opened(5, "cpu"), range(12)) for name in (simulated.NAME, "cpu")))


def test_hidden_states_of_recurrent_policies_stay_on_the_device() -> None:
    settings: dict[str, Any] = {"recurrent": RecurrentConfig("gru", 4)}
    on_cpu = run_episodes(made(device="cpu", **settings), opened(5, "cpu"), range(12))
    check_same(run_episodes(made(**settings), opened(5), range(12)), on_cpu)
    check_same(run_episodes(made(**settings), opened(5, "cpu"), range(12)), on_cpu)


def test_noise_on_a_device_does_not_depend_on_the_number_of_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    one = run_episodes(made("flow", (4, 4)), opened(3), range(20), deterministic=False)
    monkeypatch.setattr(actors, "DEVICE_ROWS", 4)
    many = run_episodes(made("flow", (4, 4)), opened(11), range(20), deterministic=False)
    check_same(one, many)


@pytest.mark.parametrize("actor", [RandomActor(), NoisyActor(PolicyActor(made()), 0.3)], ids=["random", "noisy"])
def test_actors_with_noise_draw_it_on_the_device(actor: RandomActor | NoisyActor) -> None:
    sim = opened(3)
    first, second = (run_episodes(actor, opened(count), range(9)) for count in (3, 5))
    check_same(first, second)
    seeds = torch.arange(3, device=simulated.DEVICE)
    with simulated.record() as found:
        actor(sim, {key: value[:, None] for key, value in sim.reset(0).items()}, seeds, seeds, seeds)
    assert found.waits <= 5, found.places()  # bounds and the check of the actions, and the reset


def test_actions_that_are_not_finite_are_reported_with_their_episode() -> None:
    policy = made()
    for parameter in policy.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    with pytest.raises(UserError, match="non-finite action in episode 5 at decision 0"):
        run_episodes(policy, opened(3), range(5, 8))


def test_numbers_of_a_device_stream_are_those_of_splitmix64() -> None:
    seeds, steps = (torch.tensor(values, device=simulated.DEVICE) for values in ([3, 10_000], [0, 7]))
    streams = row_generator(seeds, steps)
    with simulated.record() as found:
        first = streams.normal((2, 3))
    assert found.launches <= 22 and not found.waits, found.places()
    drawn = torch.cat([first, streams.normal((2, 2))], 1).tolist()
    for row, key in zip(drawn, ((3, 0), (10_000, 7)), strict=True):
        assert row == pytest.approx([_reference(*key, k) for k in range(1, 6)], abs=1e-6)


def _reference(seed: int, step: int, index: int) -> float:
    x = (seed * 0xD1342543DE82EF95 + step * 0xAF251AF3B0F025B5 + index * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    x = (x ^ x >> 31) >> 12
    return NormalDist().inv_cdf((x - 2**52 * (x >= 2**51) + 0.5) / 2**52 + 0.5)


def test_device_streams_are_standard_normal_and_independent() -> None:
    seeds = torch.arange(10_000, 14_096, device=simulated.DEVICE)
    now, later = (row_generator(seeds, torch.full_like(seeds, step)).normal((4096, 64)).cpu() for step in (0, 1))
    size = now.numel() ** 0.5
    assert abs(now.mean()) < 4 / size and abs(now.var() - 1) < 6 / size and abs(now.pow(4).mean() - 3) < 40 / size
    for first, second in ((now[1:], now[:-1]), (now[:, 1:], now[:, :-1]), (now, later)):  # rows, numbers, steps
        assert abs((first * second).mean()) < 4 / size
    level = torch.special.ndtr(now.flatten()).sort().values
    expected = torch.arange(1, len(level) + 1) / len(level)
    assert (level - expected).abs().max() < 1.63 / size  # Kolmogorov-Smirnov at 1 %


def test_streams_on_the_cpu_are_those_of_numpy() -> None:
    seeds, steps = torch.tensor([4, 5]), torch.tensor([0, 2])
    assert torch.equal(row_generator(seeds, steps).normal((2, 3)), PerRowGenerator([4, 5], [0, 2]).normal((2, 3)))
