"""Tests of imagined rollouts before acting: the chosen chunks with a true model, a blind model and a video model."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from small_world import small_films, small_world
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator, Randomness, normal
from robopolicy.worldmodel.contract import Judgement
from robopolicy.worldmodel.imagined import FunctionDynamics, ImaginedPolicy, ShootingConfig, VideoDynamics
from robopolicy.worldmodel.latent import EnsembleWorldModel, LatentWorldModel
from robopolicy.worldmodel.videos import VideoDataset


class Guessing(Policy):
    """Samples standard normal actions; its deterministic action is zero."""

    name = "guessing"

    def __init__(self, horizon: int = 2, action_horizon: int = 2, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.spec = PolicySpec(shapes or {"state": (1,)}, 1, horizon=horizon, action_horizon=action_horizon)

    def act(self, obs: dict[str, Tensor], *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        rows = len(next(iter(obs.values())))
        shape = (rows, self.spec.horizon, self.spec.action_dim)
        return torch.zeros(shape) if deterministic else normal(shape, generator, torch.device("cpu"))


def move(obs: dict[str, Tensor], action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Moves to s' = s + a with reward -(s' - 1)^2."""
    state = obs["state"] + action
    return {"state": state}, -(state[:, 0] - 1).square()


def blind(obs: dict[str, Tensor], action: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the same observation and zero reward."""
    return obs, torch.zeros(len(action))


def planner(function: Any = move, base: Policy | None = None, **settings: Any) -> ImaginedPolicy:
    return ImaginedPolicy(base or Guessing(), FunctionDynamics(function), ShootingConfig(**settings))


def states(rows: int) -> dict[str, Tensor]:
    return {"state": torch.linspace(-1, 1, rows).view(-1, 1, 1)}


def random_world(videos: VideoDataset, seed: int = 0) -> LatentWorldModel:
    """A world model with random weights, because an untrained one hardly distinguishes actions and noise."""
    torch.manual_seed(seed)
    world = small_world(videos)
    for weights in world.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.15)
    return world


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def true_return(state: Tensor, chunk: Tensor, still: int = 0) -> Tensor:
    """Returns the reward of executing `chunk` `(..., H)` from `state`, then of `still` zero actions."""
    path = state + chunk.cumsum(-1)
    return -(path - 1).square().sum(-1) - still * (path[..., -1] - 1).square()


@pytest.mark.parametrize("depth", [1, 3])
def test_planner_with_the_true_model_executes_the_best_candidate(depth):
    policy, obs = planner(candidates=16, depth=depth), states(5)
    found = policy.propose(obs, generator=seeded())
    expected = true_return(obs["state"], found.chunks[..., 0], still=2 * (depth - 1))
    torch.testing.assert_close(found.values, expected)
    executed = policy.act(obs, generator=seeded())
    torch.testing.assert_close(executed, found.chunks[torch.arange(5), expected.argmax(1)])


def test_imagined_return_discounts_executed_actions_only():
    policy = planner(base=Guessing(horizon=3, action_horizon=2), candidates=2, discount=0.5)
    value = policy.imagine({"state": torch.zeros(1, 1, 1)}, torch.tensor([[1.0, 2, 9], [0, 0, 5]]).view(1, 2, 3, 1))
    torch.testing.assert_close(value, torch.tensor([[-0.0 - 0.5 * 4, -1.0 - 0.5]]))


def test_later_decisions_are_discounted_by_the_steps_before_them():
    def paid(obs, action):
        return obs, torch.ones(len(action))

    policy = planner(paid, base=Guessing(horizon=3, action_horizon=2), candidates=1, depth=2, discount=0.5)
    value = policy.imagine({"state": torch.zeros(1, 1, 1)}, torch.zeros(1, 1, 3, 1))
    assert value.item() == 1.0 + 0.5 + 0.25 + 0.125


def test_planner_with_one_candidate_acts_like_the_base_policy():
    base, obs = Guessing(), states(4)
    policy = planner(base=base, candidates=1)
    assert torch.equal(policy.act(obs, generator=seeded()), base.act(obs, generator=seeded()))
    assert torch.equal(policy.act(obs, deterministic=True), base.act(obs, deterministic=True))


def test_planner_with_a_blind_model_keeps_the_base_action_distribution():
    obs = {"state": torch.zeros(4000, 1, 1)}
    executed = planner(blind, candidates=4).act(obs, generator=seeded())
    assert abs(float(executed.mean())) < 0.05 and float(executed.std()) == pytest.approx(1.0, abs=0.05)


def test_more_candidates_and_rounds_never_lower_the_imagined_return():
    obs, best = states(64), []
    for rounds in range(4):
        policy = planner(candidates=8, rounds=rounds)
        found = policy.propose(obs, generator=seeded())
        assert found.chunks.shape == (64, 8 * (1 + rounds), 2, 1)
        best.append(found.values.amax(1))
    assert all(bool((later >= earlier).all()) for earlier, later in pairwise(best))
    assert float(best[3].mean()) > 0.5 * float(best[0].mean())  # returns are negative
    single = planner(candidates=2).propose(obs, generator=seeded()).values.amax(1)
    assert float(best[0].mean()) > float(single.mean())


def test_refined_chunks_stay_within_the_range_of_proposals():
    found = planner(candidates=4, rounds=3).propose(states(8), generator=seeded())
    first, later = found.chunks[:, :4], found.chunks[:, 4:]
    assert bool((later <= first.amax(1, keepdim=True)).all() & (later >= first.amin(1, keepdim=True)).all())


def test_a_row_has_its_own_noise():
    policy, obs = planner(candidates=4, rounds=1), states(3)
    every = policy.act(obs, generator=PerRowGenerator([5, 6, 7], [0, 0, 0]))
    alone = policy.act({"state": obs["state"][1:2]}, generator=PerRowGenerator([6], [0]))
    torch.testing.assert_close(every[1:2], alone)


def test_video_rollouts_are_imagined_and_scored_by_the_success_detector():
    videos = small_films()
    world = random_world(videos)
    spec = world.spec
    shapes = {key: videos.episodes.arrays[key].shape[1:] for key in spec.proprio}
    dynamics = VideoDynamics(world, world.judge, shapes)
    base = Guessing(horizon=2, action_horizon=2)
    base.spec = PolicySpec({f"image.{spec.cameras[0]}": (3, spec.size, spec.size)}, spec.action_dim, 2, 2)
    policy = ImaginedPolicy(base, dynamics, ShootingConfig(candidates=3, depth=2), dynamics.observation)
    frame = videos.episodes
    obs = {key: torch.from_numpy(frame.arrays[key][:2])[:, None] for key in policy.spec.observation}
    found = policy.propose(obs, generator=seeded())
    assert found.values.shape == (2, 3) and len(found.values[0].unique()) > 1
    torch.testing.assert_close(policy.propose(obs, generator=seeded()).values, found.values)
    executed = policy.act(obs, generator=seeded())
    assert torch.equal(executed, found.best()) and set(policy.spec.observation) == set(dynamics.observation)


def test_video_reward_is_the_gain_in_success_and_progress():
    videos = small_films(4)
    world, shown = small_world(videos), []
    answers = iter([(0.2, 0.1, False), (0.5, 0.2, False), (0.9, 0.3, True), (0.6, 0.3, False)])

    def judge(images: Any, proprio: Tensor) -> Judgement:
        shown.append(tuple(images["top"].shape[:2]))
        success, progress, uncertain = next(answers)
        return Judgement(torch.tensor([success]), torch.tensor([progress]), torch.tensor([uncertain]))

    shapes = {key: videos.episodes.arrays[key].shape[1:] for key in world.spec.proprio}
    dynamics = VideoDynamics(world, judge, shapes)
    obs = {key: torch.from_numpy(videos.episodes.arrays[key][:1]) for key in dynamics.observation}
    state = dynamics.begin(obs, torch.zeros(1, dtype=torch.int64))
    paid = []
    for _ in range(3):
        state, _, rewards = dynamics.step(state, torch.zeros(1, 2, 2))
        paid.append(rewards[0].tolist())
    # The values are 0.3, 0.7, 0.3 (the judge is uncertain of the success) and 0.9.
    assert [row[0] for row in paid] == [0.0, 0.0, 0.0]
    assert [row[1] for row in paid] == pytest.approx([0.4, -0.4, 0.6])
    assert shown == [(1, 1), (1, 2), (1, 2), (1, 2)]


def video_planner(model: Any, judge: Any, videos: VideoDataset, **settings: Any) -> ImaginedPolicy:
    shapes = {key: videos.episodes.arrays[key].shape[1:] for key in model.spec.proprio}
    dynamics = VideoDynamics(model, judge, shapes)
    base = Guessing()
    base.spec = PolicySpec(shapes, model.spec.action_dim, 2, 2)
    return ImaginedPolicy(base, dynamics, ShootingConfig(**settings), dynamics.observation)


def frames_of(videos: VideoDataset, frame: int, rows: int = 1) -> dict[str, Tensor]:
    """The observation of a frame, in all rows."""
    arrays = videos.episodes.arrays
    return {key: torch.from_numpy(arrays[key][[frame] * rows])[:, None] for key in ("image.top", *videos.spec.proprio)}


def test_equal_chunks_of_a_decision_have_equal_values_in_any_model():
    videos = small_films(4)
    members = [random_world(videos, seed) for seed in (0, 1)]
    chunks = torch.ones(1, 6, 2, 2)
    for model in (members[0], EnsembleWorldModel(members)):
        policy = video_planner(model, members[0].judge, videos, depth=2)
        values = policy.imagine(frames_of(videos, 3), chunks, torch.tensor([7]))
        torch.testing.assert_close(values, values[:, :1].expand_as(values))
        assert not torch.allclose(values, policy.imagine(frames_of(videos, 3), chunks, torch.tensor([8])), atol=1e-4)


def test_chunks_with_the_same_noise_share_network_calls(monkeypatch: pytest.MonkeyPatch):
    videos = small_films(4)
    world, sizes = random_world(videos), []
    call = world._call
    monkeypatch.setattr(world, "_call", lambda state, chunk: sizes.append(len(chunk)) or call(state, chunk))
    video_planner(world, world.judge, videos).imagine(frames_of(videos, 3), torch.zeros(1, 6, 2, 2))
    assert sizes == [world.config.rows] * 2 * 2  # six videos of two frames, in calls of four rows


def test_an_ensemble_has_the_mean_value_of_its_members():
    videos = small_films(4)
    members, chunks = [random_world(videos, seed) for seed in (0, 1)], torch.linspace(-1, 1, 16).view(1, 4, 2, 2)
    both = video_planner(EnsembleWorldModel(members), members[0].judge, videos)
    alone = [video_planner(member, members[0].judge, videos) for member in members]
    found = [policy.imagine(frames_of(videos, 3), chunks) for policy in (both, *alone)]
    torch.testing.assert_close(found[0], (found[1] + found[2]) / 2)
    assert not torch.allclose(found[1], found[2], atol=1e-3)


def test_the_value_of_a_chunk_does_not_depend_on_its_row():
    videos = small_films(4)
    world = random_world(videos)
    policy = video_planner(world, world.judge, videos, candidates=3, depth=2, rounds=1)
    alone = policy.propose(frames_of(videos, 3), generator=PerRowGenerator([5], [2]))
    many = policy.propose(frames_of(videos, 3, rows=3), generator=PerRowGenerator([4, 6, 5], [2, 2, 2]))
    torch.testing.assert_close(many.chunks[2:], alone.chunks)
    torch.testing.assert_close(many.values[2:], alone.values)


def test_unpredicted_observations_are_refused_beyond_depth_1():
    with pytest.raises(UserError, match="does not predict 'state', which the policy needs; set depth 1"):
        ImaginedPolicy(Guessing(), FunctionDynamics(move), ShootingConfig(depth=2), {"image.top": (3, 8, 8)})
    ImaginedPolicy(Guessing(), FunctionDynamics(move), ShootingConfig(), {"image.top": (3, 8, 8)})
