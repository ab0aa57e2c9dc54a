"""Tests that the replay buffer holds exactly the executed steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.data.batches import ReplaySampleSpec
from robopolicy.data.replay import Replay
from robopolicy.policies.base import Sample
from robopolicy.rollout.off_policy import ReplaySampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import Step
from robopolicy.sim.registry import SimOptions
from robopolicy_tasks.toy.point_mass import PointMassSim

ENVS, EXECUTE = 5, 3


class LoggedSim(PointMassSim):
    """A simulator that logs every control step of every active environment."""

    def __init__(self) -> None:
        super().__init__(SimOptions(num_envs=ENVS, reward="shaped"))
        self.logs: list[list[dict[str, Tensor]]] = [[] for _ in range(ENVS)]

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        before, clipped = self._state.clone(), action.clamp(-1, 1)
        step = super().step(action, active)
        for env in range(ENVS):
            if active is None or active[env]:
                row = {"obs": before, "action": clipped, "after": step.final_obs["state"], "reward": step.reward}
                row |= {"terminated": step.terminated, "truncated": step.truncated}
                self.logs[env].append({key: value[env].clone() for key, value in row.items()})
        return step


def act(obs: dict[str, Tensor], *, generator: Any = None) -> Sample:
    """Act towards the goal with noise, beyond the action bounds."""
    state = obs["state"][:, -1]
    pull = 6 * (state[:, 4:] - state[:, :2]) - 2 * state[:, 2:4]
    chunk = pull[:, None] + torch.randn(len(state), 4, 2, generator=generator)
    return Sample(chunk, {"drawn": chunk}, chunk.new_zeros(len(state), 1))


def sampler(sim: PointMassSim | None = None, seed: int = 3) -> ReplaySampler:
    sim = sim or PointMassSim(SimOptions(num_envs=ENVS))
    chunked = ChunkedSim(sim, action_horizon=EXECUTE, obs_horizon=2)
    return ReplaySampler(chunked, Replay(ENVS * 400, ENVS, gamma=0.9), seed=seed)


def request(**settings: Any) -> ReplaySampleSpec:
    return ReplaySampleSpec(**{"batch_size": 1, "horizon": 1, "steps": 1, "gamma": 0.9} | settings)


def test_the_replay_buffer_equals_the_logged_steps() -> None:
    sim = LoggedSim()
    collector = sampler(sim)
    collector.collect(act, 30)
    assert collector.env_steps == sum(map(len, sim.logs))
    ends = 0
    for env, log in enumerate(sim.logs):
        slot = env * collector.replay.length
        for number, row in enumerate(log[:-1]):
            batch = collector.replay.take(torch.tensor([slot]), request())
            done = bool(row["terminated"] | row["truncated"])
            assert torch.equal(batch.obs["state"][0, 0], row["obs"])
            assert torch.equal(batch.chunk[0, 0], row["action"])
            assert torch.equal(batch.next_obs["state"][0, 0], row["after"])
            assert float(batch.reward) == float(row["reward"])
            assert float(batch.discount) == (0.0 if row["terminated"] else pytest.approx(0.9))
            if not done:
                assert torch.equal(row["after"], log[number + 1]["obs"])
            slot += 1 + done  # the slot after an episode holds its last observation
            ends += done
    assert ends > 5


def test_stored_actions_are_clipped_to_the_bounds() -> None:
    collector = sampler()
    collector.collect(act, 10)
    chunk = collector.replay.sample(request(batch_size=500), torch.Generator().manual_seed(0)).chunk
    assert chunk.abs().max() == 1.0


def test_records_match_their_chunks() -> None:
    sim = LoggedSim()
    collector = sampler(sim)
    chunks: list[Tensor] = []

    def logged_act(obs: dict[str, Tensor], *, generator: Any = None) -> Sample:
        sample = act(obs, generator=generator)
        chunks.append(sample.chunk)
        return sample

    collector.collect(logged_act, 20)
    wanted = request(batch_size=300, horizon=EXECUTE, steps=EXECUTE, chunk_starts_only=True)
    batch = collector.replay.sample(wanted, torch.Generator().manual_seed(0))
    record = batch.record["drawn"]
    executed = batch.mask.bool()
    torch.testing.assert_close(record[:, :EXECUTE].clamp(-1, 1)[executed], batch.chunk[executed])
    everything = torch.cat(chunks)
    assert all(bool((everything == row).flatten(1).all(1).any()) for row in record[:20])


def test_a_resumed_sampler_collects_the_same_rows_as_an_uninterrupted_one() -> None:
    straight = sampler()
    straight.collect(act, 15)
    state = straight.state_dict()
    straight.collect(act, 15)
    resumed = sampler(seed=9)
    resumed.load_state_dict(state)
    resumed.collect(act, 15)
    assert resumed.env_steps == straight.env_steps
    wanted = request(batch_size=200, horizon=4, steps=3, obs_horizon=2)
    one, two = (each.replay.sample(wanted, torch.Generator().manual_seed(1)) for each in (straight, resumed))
    assert torch.equal(one.index, two.index) and torch.equal(one.chunk, two.chunk)
    assert torch.equal(one.obs["state"], two.obs["state"])


def test_a_new_sampler_on_an_existing_buffer_starts_new_episodes() -> None:
    first = sampler()
    first.collect(act, 2)
    running = first.replay._age.copy()
    second = ReplaySampler(first.sim, first.replay, seed=50)
    second.collect(act, 1)
    for env in range(ENVS):
        assert running[env] == 2 * EXECUTE
        base = env * first.replay.length
        last = first.replay.take(torch.tensor([base + 2 * EXECUTE - 2]), request(steps=3, horizon=3))
        assert last.steps.tolist() == [1] and last.mask.tolist() == [[1, 0, 0]]
        fresh = first.replay.take(torch.tensor([base + 2 * EXECUTE]), request(obs_horizon=2)).obs["state"][0]
        assert torch.equal(fresh[0], fresh[1])  # its history repeats its first observation


def test_finished_episodes_are_counted_once() -> None:
    sim = LoggedSim()
    collector = sampler(sim)
    collector.collect(act, 30)
    finished = sum(bool(row["terminated"] | row["truncated"]) for log in sim.logs for row in log)
    stats = collector.episode_stats()
    assert stats["rollout/episodes"] == finished and stats["rollout/success"] > 0
    assert collector.episode_stats() == {}
