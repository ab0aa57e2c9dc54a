"""What lies in the memory after play is what was really played."""

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


class Diary(PointMassSim):
    """Writes down every control step of every environment that moved."""

    def __init__(self) -> None:
        super().__init__(SimOptions(num_envs=ENVS, reward="shaped"))
        self.pages: list[list[dict[str, Tensor]]] = [[] for _ in range(ENVS)]

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        before, clipped = self._state.clone(), action.clamp(-1, 1)
        step = super().step(action, active)
        for env in range(ENVS):
            if active is None or active[env]:
                row = {"obs": before, "action": clipped, "after": step.final_obs["state"], "reward": step.reward}
                row |= {"terminated": step.terminated, "truncated": step.truncated}
                self.pages[env].append({key: value[env].clone() for key, value in row.items()})
        return step


def act(obs: dict[str, Tensor], *, generator: Any = None) -> Sample:
    """Towards the goal, beyond the bounds of the actions, with some noise."""
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


def test_the_memory_equals_the_diary() -> None:
    sim = Diary()
    playing = sampler(sim)
    playing.collect(act, 30)
    assert playing.env_steps == sum(map(len, sim.pages))
    ends = 0
    for env, page in enumerate(sim.pages):
        slot = env * playing.replay.length
        for number, row in enumerate(page[:-1]):
            batch = playing.replay.take(torch.tensor([slot]), request())
            done = bool(row["terminated"] | row["truncated"])
            assert torch.equal(batch.obs["state"][0, 0], row["obs"])
            assert torch.equal(batch.chunk[0, 0], row["action"])
            assert torch.equal(batch.next_obs["state"][0, 0], row["after"])
            assert float(batch.reward) == float(row["reward"])
            assert float(batch.discount) == (0.0 if row["terminated"] else pytest.approx(0.9))
            if not done:
                assert torch.equal(row["after"], page[number + 1]["obs"])
            slot += 1 + done  # after an episode lies its last observation
            ends += done
    assert ends > 5


def test_played_actions_are_clipped_to_the_bounds() -> None:
    playing = sampler()
    playing.collect(act, 10)
    chunk = playing.replay.sample(request(batch_size=500), torch.Generator().manual_seed(0)).chunk
    assert chunk.abs().max() == 1.0


def test_records_belong_to_the_chunks_they_were_noted_for() -> None:
    sim = Diary()
    playing = sampler(sim)
    chunks: list[Tensor] = []

    def noted(obs: dict[str, Tensor], *, generator: Any = None) -> Sample:
        sample = act(obs, generator=generator)
        chunks.append(sample.chunk)
        return sample

    playing.collect(noted, 20)
    wanted = request(batch_size=300, horizon=EXECUTE, steps=EXECUTE, chunk_starts_only=True)
    batch = playing.replay.sample(wanted, torch.Generator().manual_seed(0))
    drawn = batch.record["drawn"]
    played = batch.mask.bool()
    torch.testing.assert_close(drawn[:, :EXECUTE].clamp(-1, 1)[played], batch.chunk[played])
    everything = torch.cat(chunks)
    assert all(bool((everything == row).flatten(1).all(1).any()) for row in drawn[:20])


def test_a_resumed_sampler_plays_what_the_uninterrupted_one_would() -> None:
    straight = sampler()
    straight.collect(act, 15)
    state = straight.state_dict()
    straight.collect(act, 15)
    resumed = sampler(seed=9)
    resumed.load_state_dict(state)
    resumed.collect(act, 15)
    assert resumed.env_steps == straight.env_steps
    wanted = request(batch_size=200, horizon=4, steps=3, obs_horizon=2)
    one, two = (played.replay.sample(wanted, torch.Generator().manual_seed(1)) for played in (straight, resumed))
    assert torch.equal(one.index, two.index) and torch.equal(one.chunk, two.chunk)
    assert torch.equal(one.obs["state"], two.obs["state"])


def test_a_new_sampler_on_an_old_memory_starts_new_episodes() -> None:
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
        assert torch.equal(fresh[0], fresh[1])  # its history is its own first observation


def test_finished_episodes_are_counted_once() -> None:
    sim = Diary()
    playing = sampler(sim)
    playing.collect(act, 30)
    finished = sum(bool(row["terminated"] | row["truncated"]) for page in sim.pages for row in page)
    stats = playing.episode_stats()
    assert stats["rollout/episodes"] == finished and stats["rollout/success"] > 0
    assert playing.episode_stats() == {}
