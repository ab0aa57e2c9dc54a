"""Tests of vines: shared start states, different actions, whole episodes, unchanged rollouts and exact resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from robopolicy.contrib.control.vine_rollout import VineSampler
from robopolicy.errors import UserError
from robopolicy.policies.base import Sample
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim


def chunked(task: str = "toy/point_mass", num_envs: int = 3) -> ChunkedSim:
    return ChunkedSim(make_sim(task, SimOptions(num_envs=num_envs)), action_horizon=2, obs_horizon=2)


def noisy(obs: dict[str, torch.Tensor], *, generator: Any = None) -> Sample:
    rows, actions = len(next(iter(obs.values()))), 2
    chunk = torch.rand(rows, 2, actions, generator=generator) * 2 - 1
    return Sample(chunk, {"chunk": chunk}, torch.zeros(rows, 1))


def test_vines_start_from_rollout_states_and_take_different_actions() -> None:
    sampler = VineSampler(chunked(), decisions=15, branch_points=2, branches=3)
    for _ in range(2):  # the second rollout crosses episode ends
        rollout = sampler.collect(noisy)
        assert len(rollout.branches) == 6
        moments = []
        for number, vine in enumerate(rollout.branches):
            begin = vine.obs["state"][0]
            same = [t for t in range(15) if torch.equal(rollout.obs["state"][t], begin)]
            assert len(same) == 1
            moments += same
            assert vine.group.tolist() == [3 * (number // 3) + env for env in range(3)]
            done = vine.terminated | vine.truncated
            assert done.sum(0).tolist() == [1, 1, 1]
            assert torch.equal(vine.valid.sum(0) - 1, done.int().argmax(0))
        assert moments == sorted(moments) and len(set(moments)) == 2
        first, second = (vine.record["chunk"] for vine in rollout.branches[:2])
        assert not torch.equal(first[0], second[0])


def test_a_vine_with_the_actions_of_the_rollout_reproduces_it() -> None:
    sampler = VineSampler(chunked(), decisions=15, branch_points=1, branches=1)
    record: list[torch.Tensor] = []

    def replaying(obs: dict[str, torch.Tensor], *, generator: Any = None) -> Sample:
        sample = noisy(obs, generator=generator)
        if generator is sampler._generator:
            record.append(sample.chunk)
            return sample
        moment = start + calls.pop()
        return Sample(record[moment], sample.record, sample.logp) if moment < 15 else sample

    start = int(torch.randperm(15, generator=torch.Generator().manual_seed(1))[0])
    calls = list(range(100))[::-1]
    rollout = sampler.collect(replaying)
    vine = rollout.branches[0]
    steps = min(15 - start, len(vine.valid))
    assert torch.equal(vine.obs["state"][:steps], rollout.obs["state"][start : start + steps])


def test_vines_leave_rollouts_unchanged() -> None:
    plain, vines = (
        RolloutSampler(chunked(), decisions=15),
        VineSampler(chunked(), decisions=15, branch_points=3, branches=2),
    )
    for _ in range(3):
        one, other = plain.collect(noisy), vines.collect(noisy)
        for name in ("reward", "terminated", "truncated", "steps"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(one.obs["state"], other.obs["state"])
        assert torch.equal(one.last_obs["state"], other.last_obs["state"])
        assert plain.episode_stats() == vines.episode_stats()
    assert vines.env_steps > plain.env_steps


def test_a_restored_sampler_collects_the_same_rollout_and_vines() -> None:
    sampler = VineSampler(chunked(), decisions=5, branch_points=1, branches=2)
    sampler.collect(noisy)
    state = copy.deepcopy(sampler.state_dict())
    expected = sampler.collect(noisy)
    again = VineSampler(chunked(), decisions=5, branch_points=1, branches=2, seed=9)
    again.load_state_dict(state)
    found = again.collect(noisy)
    assert torch.equal(found.obs["state"], expected.obs["state"]) and again.env_steps == sampler.env_steps
    for new, old in zip(found.branches, expected.branches, strict=True):
        assert torch.equal(new.record["chunk"], old.record["chunk"]) and torch.equal(new.reward, old.reward)


def test_a_backend_without_a_state_is_refused(monkeypatch) -> None:
    sim = chunked()
    monkeypatch.setattr(type(sim.sim), "state_dict", VectorSim.state_dict)
    with pytest.raises(UserError, match="backend that saves its state"):
        VineSampler(sim, decisions=5, branch_points=1, branches=2)
