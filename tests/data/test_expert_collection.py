from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.data.batches import ReplaySampleSpec
from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import LeRobotWriter, read_lerobot
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.policies.noise import row_generator
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim


class Walk(VectorSim):
    """A point that must reach a goal in 12 steps; the goal depends on the episode seed, every third goal is too far."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.device = num_envs, torch.device("cpu")
        self.spec = SimSpec(
            task="toy/walk",
            observation={"state": TensorSpec((2,)), "image.top": TensorSpec((3, 4, 4), torch.uint8)},
            action_low=torch.tensor([-1.0]),
            action_high=torch.tensor([1.0]),
            control_dt=0.1,
            max_episode_steps=12,
        )

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        assert isinstance(seed, int)
        self.episode_seed = seed + torch.arange(self.num_envs)
        self._next = seed + self.num_envs
        self.position = torch.zeros(self.num_envs)
        self.episode_step = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._observe()

    @property
    def goal(self) -> Tensor:
        return torch.where(self.episode_seed % 3 == 2, 100.0, 2.0 + self.episode_seed % 5)

    def _observe(self) -> Observation:
        image = (self.position.abs() * 10).to(torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4)
        return {"state": torch.stack([self.position, self.goal], 1), "image.top": image.contiguous()}

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        self.position = self.position + action[:, 0].clamp(-1, 1)
        self.episode_step = self.episode_step + 1
        success = (self.position - self.goal).abs() < 0.5
        truncated = (self.episode_step == 12) & ~success
        final = self._observe()
        for row in (success | truncated).nonzero().flatten().tolist():
            self.episode_seed[row], self.position[row], self.episode_step[row] = self._next, 0.0, 0
            self._next += 1
        return Step(self._observe(), success.float(), success, truncated, final, {"success": success})


def expert(sim: VectorSim, obs: Observation) -> Tensor:
    assert isinstance(sim, Walk)
    return (sim.goal - sim.position)[:, None]  # exceeds the bounds: the recorded action must be clipped


class Sink:
    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def add(self, episode: Episode) -> None:
        self.episodes.append(episode)


@pytest.mark.parametrize("only_success", [True, False])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_dataset_does_not_depend_on_the_number_of_environments(only_success: bool, noise: float) -> None:
    datasets, reports = [], []
    for num_envs in (1, 5):
        sink = Sink()
        reports.append(
            collect(Walk(num_envs), expert, sink, episodes=9, seed=4, only_success=only_success, noise=noise)
        )
        datasets.append(Episodes.from_list(sink.episodes, 0.1))
    assert reports[0] == reports[1]
    one, five = datasets
    assert one.seeds.tolist() == five.seeds.tolist() == sorted(one.seeds.tolist())
    assert all(np.array_equal(one.arrays[key], five.arrays[key]) for key in one.arrays)


def test_only_successes_are_stored_and_the_success_rate_counts_all_attempts() -> None:
    sink = Sink()
    report = collect(Walk(4), expert, sink, episodes=6)
    assert [episode.seed for episode in sink.episodes] == [0, 1, 3, 4, 6, 7]
    assert (report.kept, report.attempts, report.successes) == (6, 8, 6)
    assert "6 of 8 (75.0%)" in str(report)


def test_frames_pair_each_observation_with_its_action() -> None:
    sink = Sink()
    collect(Walk(1), expert, sink, episodes=1)  # goal 2: two steps of 1
    arrays = sink.episodes[0].arrays
    assert arrays["state"][:, 0].tolist() == [0.0, 1.0]
    assert arrays["action"].tolist() == [[1.0], [1.0]]
    assert arrays["terminated"].tolist() == arrays["success"].tolist() == [False, True]


def test_noise_disturbs_the_motion_but_not_the_recorded_action() -> None:
    sink = Sink()
    collect(Walk(1), expert, sink, episodes=1, seed=4, noise=0.3)  # goal 6
    arrays = sink.episodes[0].arrays
    moved = np.diff(arrays["state"][:, 0])
    assert (moved < 1.0).any()
    assert (arrays["action"][:4] == 1.0).all()


def test_noise_differs_from_the_noise_of_the_policy() -> None:
    drawn = []

    def noisy(sim: VectorSim, obs: Observation) -> Tensor:
        drawn.append(row_generator(sim.episode_seed, sim.episode_step).normal((sim.num_envs, 1)))
        return torch.zeros(sim.num_envs, 1)

    sink = Sink()
    collect(Walk(1), noisy, sink, episodes=8, seed=4, only_success=False, noise=0.1)
    disturbance = np.concatenate([episode.arrays["executed"][:, 0] for episode in sink.episodes])
    assert abs(np.corrcoef(torch.cat(drawn)[:, 0].numpy(), disturbance)[0, 1]) < 0.3


def test_replay_of_a_noisy_dataset_uses_the_executed_actions(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "walk", control_dt=0.1, video=False) as writer:
        collect(Walk(3), expert, writer, episodes=6, seed=1, only_success=False, noise=0.3)
    data = read_lerobot(tmp_path / "walk")
    assert data.observation_keys == ("state", "image.top")
    assert not np.allclose(data.arrays["executed"], data.arrays["action"])
    window = ReplaySampleSpec(batch_size=50, horizon=1, steps=1, gamma=0.9)
    batch = Replay.from_episodes(data).sample(window, torch.Generator().manual_seed(0))
    moved = (batch.next_obs["state"] - batch.obs["state"])[:, -1, :1]
    known = batch.discount > 0
    assert int(known.sum()) > 25
    torch.testing.assert_close(moved[known], batch.chunk[known, 0])
    imitated = ChunkSampler(data, horizon=1, lookahead_steps=1).take(torch.arange(len(data)))
    assert np.array_equal(imitated.chunk[:, 0], data.arrays["action"])
    assert imitated.executed is not None and np.array_equal(imitated.executed[:, 0], data.arrays["executed"])


def test_noisy_and_undisturbed_datasets_can_be_joined() -> None:
    sinks = [Sink(), Sink()]
    for sink, noise in zip(sinks, (0.3, 0.0), strict=True):
        collect(Walk(2), expert, sink, episodes=2, noise=noise)
    noisy, plain = (Episodes.from_list(sink.episodes, 0.1) for sink in sinks)
    both = Episodes.concat([noisy, plain])
    expected = np.concatenate([noisy.arrays["executed"], plain.arrays["action"]])
    assert np.array_equal(both.arrays["executed"], expected)
    assert (
        np.array_equal(both.with_executed_actions().arrays["action"], expected)
        and "executed" not in both.with_executed_actions().arrays
    )
    assert plain.with_executed_actions() is plain


def test_collection_streams_into_a_dataset(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "walk", control_dt=0.1, video=False) as writer:
        report = collect(Walk(3), expert, writer, episodes=4)
    data = read_lerobot(tmp_path / "walk")
    assert data.num_episodes == 4 and len(data) == report.frames
    assert data.success.all() and set(data.tasks) == {"toy/walk"}


def test_collection_stops_if_the_expert_never_succeeds() -> None:
    with pytest.raises(UserError, match="only 0 of 100"):
        collect(Walk(8), lambda sim, obs: torch.zeros(sim.num_envs, 1), Sink(), episodes=1)


def test_a_task_without_success_is_refused() -> None:
    class Aimless(Walk):
        def step(self, action: Tensor, active: Tensor | None = None) -> Step:
            step = super().step(action, active)
            return Step(step.obs, step.reward, step.terminated, step.truncated, step.final_obs)

    with pytest.raises(UserError, match="defines no success"):
        collect(Aimless(1), expert, Sink(), episodes=1)


@pytest.mark.parametrize("only_success", [True, False])
def test_success_may_be_reported_only_at_the_end_of_an_episode(only_success: bool) -> None:
    class Verdict(Walk):
        def step(self, action: Tensor, active: Tensor | None = None) -> Step:
            step = super().step(action, active)
            return step if bool(step.done.any()) else replace(step, info={})

    for num_envs in (1, 2, 5):
        sparse, plain = Sink(), Sink()
        report = collect(Verdict(num_envs), expert, sparse, episodes=6, only_success=only_success)
        assert report == collect(Walk(num_envs), expert, plain, episodes=6, only_success=only_success)
        one, other = (Episodes.from_list(sink.episodes, 0.1) for sink in (sparse, plain))
        assert one.arrays.keys() == other.arrays.keys()
        assert all(np.array_equal(one.arrays[key], other.arrays[key]) for key in one.arrays)


def test_numbers_that_are_not_finite_name_their_episode(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"is not finite in episode 0 \(seed 0\), frame"),
        LeRobotWriter(tmp_path / "walk", control_dt=0.1) as writer,
    ):
        collect(Walk(1), lambda sim, obs: torch.full((1, 1), torch.nan), writer, episodes=1, only_success=False)
    assert list(tmp_path.iterdir()) == []
