"""Tests of SubPO: gains sum to the set function and diminish, memory is per episode, and a line is covered."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor

from robopolicy.contrib.control.positions import PositionConfig
from robopolicy.contrib.control.subpo import NOISE, OBJECTIVES, SubPO, SubPOConfig, Visited
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.on_policy import RolloutSampler

STEPS = 8
LINE = PositionConfig(indices=(0,), scale=1.0)


def learner(seed: int = 0, size: int = 6, **config: Any) -> SubPO:
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), log_std_init=-0.5), PolicySpec({"state": (size,)}, size // 3))
    settings: dict[str, Any] = {"num_steps": 16, "epochs": 2, "batch_size": 64} | config
    return SubPO(SubPOConfig(**settings), policy, total_updates=50)


def value(name: str, places: Tensor) -> float:
    """F of `places` `(L, D)`, computed directly."""
    if name == "coverage":
        return float(len(places.floor().unique(dim=0)))
    kernel = torch.exp(-torch.cdist(places, places).square() / 2)
    return float(torch.logdet(torch.eye(len(places)) + kernel / NOISE)) / 2


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_gains_sum_to_the_set_function_and_diminish(name: str) -> None:
    torch.manual_seed(0)
    walk, gain = 3 * torch.rand(4, 12, 2), OBJECTIVES[name]
    visited = Visited(2)
    visited.resume(walk[:, 0])
    total = torch.tensor([value(name, row[:1]) for row in walk])
    for t in range(1, 12):
        now = gain(walk[:, t], visited.places, visited.count)
        fewer = gain(walk[:, t], visited.places, visited.count - 1)
        assert bool((fewer >= now - 1e-5).all()) and bool((now >= 0).all())
        total = total + now
        visited.add(walk[:, t])
    torch.testing.assert_close(total, torch.tensor([value(name, row) for row in walk]), rtol=1e-4, atol=1e-4)


def rollout(path: list[float], ends: dict[int, str], last: float) -> Rollout:
    """Rollout of one environment at the positions `path`; `ends` maps steps to the way episodes end."""
    obs = torch.zeros(len(path), 1, 1, 3)
    obs[:, 0, 0, 0] = torch.tensor(path)
    cut = torch.tensor([[ends.get(t) == "truncated"] for t in range(len(path))])
    final = torch.full((int(cut.sum()), 1, 3), 9.0)
    return Rollout(
        obs={"state": obs},
        record={},
        logp=torch.zeros(len(path), 1, 1),
        reward=torch.zeros(len(path), 1),
        steps=torch.ones(len(path), 1).long(),
        terminated=torch.tensor([[ends.get(t) == "terminated"] for t in range(len(path))]),
        truncated=cut,
        final_obs={"state": final},
        last_obs={"state": torch.full((1, 1, 3), last)},
    )


def test_visit_memory_is_per_episode_and_persists_across_rollouts() -> None:
    algorithm = learner(size=3, place=LINE)
    first = rollout([0.0, 1.0, 0.0, 5.0, 0.0], {2: "truncated"}, 1.0)
    # 0 -> 1 is new; 1 -> 0 is not; 0 -> 9 (final observation) is; the next episode begins at 5: 0 and 1 are new again.
    assert algorithm.gains(first).flatten().tolist() == [1, 0, 1, 1, 1]
    second = rollout([1.0, 5.0, 2.0, 3.0], {1: "terminated"}, 3.0)
    # 5 was the first place of the episode; a terminal step has no observation; the next episode begins at 2.
    assert algorithm.gains(second).flatten().tolist() == [0, 0, 1, 0]
    elsewhere = rollout([1.0, 2.0], {}, 3.0)  # differs from the end of the last rollout: new episodes
    assert algorithm.gains(elsewhere).flatten().tolist() == [1, 1]


def test_zero_gains_give_the_task_update() -> None:
    algorithm = learner(task_coef=1.0, place=PositionConfig(scale=1e6))
    sampler = tools.sampler_for(algorithm)
    plain, other = copy.deepcopy(algorithm.state_dict()), learner(task_coef=1.0, place=PositionConfig(scale=1e6))
    data = sampler.collect(algorithm.act)
    inside = {key: value.abs() for key, value in data.obs.items()}  # one cell
    data = replace(data, obs=inside, last_obs={key: value.abs() for key, value in data.last_obs.items()})
    other.load_state_dict(plain)
    algorithm.update(data)
    super(SubPO, other).update(data)
    for key, weight in algorithm.policy.state_dict().items():
        assert torch.equal(weight, other.policy.state_dict()[key]), key


def line_rollout(algorithm: SubPO, rows: int = 32) -> Rollout:
    """Episodes on a line that start at the centre and move 0.1 to either side per step."""
    steps: list[tuple[dict[str, Tensor], Any]] = []
    place = torch.zeros(rows)
    for t in range(STEPS):
        obs = {"state": torch.stack([place, torch.full_like(place, t / STEPS), torch.zeros(rows)], 1).unsqueeze(1)}
        sample = algorithm.act(obs)
        steps.append((obs, sample))
        place = place + 0.1 * sample.chunk[:, 0, 0].sign()
    final = {"state": torch.stack([place, torch.ones(rows), torch.zeros(rows)], 1).unsqueeze(1)}
    cut = torch.zeros(STEPS, rows, dtype=torch.bool)
    cut[-1] = True
    return Rollout(
        obs={"state": torch.stack([obs["state"] for obs, _ in steps])},
        record={"raw": torch.stack([sample.record["raw"] for _, sample in steps])},
        logp=torch.stack([sample.logp for _, sample in steps]),
        reward=torch.zeros(STEPS, rows),
        steps=torch.ones(STEPS, rows).long(),
        terminated=cut,
        truncated=~cut & cut,
        final_obs={"state": final["state"][:0]},
        last_obs=steps[0][0],
    )


def test_training_increases_the_coverage_of_a_line() -> None:
    algorithm = learner(
        size=3, place=replace(LINE, scale=0.1), lr=3e-3, epochs=4, batch_size=64, gamma=1.0, gae_lambda=1.0
    )
    before = algorithm.gains(line_rollout(algorithm)).sum(0).mean()
    for _ in range(25):
        algorithm.update(line_rollout(algorithm))
    after = algorithm.gains(line_rollout(algorithm, 200)).sum(0).mean()
    assert float(before) < 4 and float(after) > 6.5  # of 7 observed cells


def test_the_reward_of_a_step_is_only_its_gain() -> None:
    mine, plain = (learner(size=3, place=replace(LINE, scale=0.1)) for _ in range(2))
    data = line_rollout(mine)
    mine.update(data)
    super(SubPO, plain).update(replace(data, reward=plain.gains(data)))
    assert tools.distance(mine.policy, plain.policy) == 0.0


def worth(place: Tensor) -> Tensor:
    """Value `(...)` of places `(..., 1)`: higher near the centre of the line."""
    return 1 + 0.5 * (place.squeeze(-1).abs() < 1.7)


def weighted(place: Tensor, seen: Tensor, count: Tensor) -> Tensor:
    return worth(place) * OBJECTIVES["coverage"](place, seen, count)


@pytest.mark.parametrize(("additive", "low", "high"), [(False, 7.0, 8.0), (True, 0.0, 3.5)])
def test_gains_cover_a_line_where_additive_rewards_do_not(additive: bool, low: float, high: float) -> None:
    algorithm = learner(size=3, place=replace(LINE, scale=0.1), lr=1e-2, epochs=4, gamma=1.0, gae_lambda=1.0)
    algorithm.gain = weighted
    for _ in range(12):
        data = line_rollout(algorithm)
        if additive:
            after = torch.cat([data.obs["state"][1:], data.last_obs["state"].unsqueeze(0)])
            paid = worth(algorithm.config.place.extract({"state": after}))
            super(SubPO, algorithm).update(replace(data, reward=torch.where(data.terminated, 0.0, paid)))
        else:
            algorithm.update(data)
    assert low < float(algorithm.gains(line_rollout(algorithm, 200)).sum(0).mean()) < high  # gains score both


def test_gains_continue_across_rollouts() -> None:
    algorithm = learner(place=PositionConfig(scale=0.05), num_steps=10)
    sampler = tools.sampler_for(algorithm, num_envs=4)
    assert isinstance(sampler, RolloutSampler)
    whole = []
    for _ in range(2):
        whole.append(sampler.collect(algorithm.act))
        algorithm.gains(whole[-1])
    running = ~(whole[1].truncated | whole[1].terminated).any(0) & ~(whole[0].truncated | whole[0].terminated).any(0)
    assert bool(running.any()) and algorithm.visited.count[running].tolist() == [21] * int(running.sum())


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.place\.key"):
        learner(place=PositionConfig(key="camera"))
    with pytest.raises(UserError, match="indices"):
        learner(place=PositionConfig(indices=(0, 6)))
    with pytest.raises(UserError, match="scale"):
        PositionConfig(scale=0)
    with pytest.raises(UserError, match="objective"):
        SubPOConfig(objective="cover")
