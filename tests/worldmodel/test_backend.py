"""Tests of world models as simulators: the contract, paired starts, evaluation, searches, and refused settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_world import small_films, small_world
from test_diagnostics import TrueWorld
from torch import Tensor

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.ood_detector import OODDetector, OODDetectorConfig, fit_ood_detector
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor, RandomActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.search.weights import SimEvaluator
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.world_sims import abstention_notes
from robopolicy.worldmodel.backend import (
    LoggedInitialStates,
    OODTermination,
    SimInitialStates,
    WorldSim,
    WorldSimConfig,
)
from robopolicy.worldmodel.contract import Images, Judgement
from robopolicy.worldmodel.videos import VideoDataset
from robopolicy_tasks.toy.push import GOAL, RADIUS, PushExpert


class TrueJudge:
    """The success rule of the pushing toy, applied to the state vector."""

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        distance = (proprio[:, -1, 2:] - proprio.new_tensor(GOAL)).norm(dim=1)
        success = (distance < RADIUS).float()
        return Judgement(success, (-distance).exp(), torch.zeros_like(success, dtype=torch.bool))


@pytest.fixture(scope="module")
def videos() -> VideoDataset:
    return small_films()


def real(num_envs: int = 1):
    """Returns the pushing toy with its camera."""
    return make_sim("toy/push", SimOptions(num_envs=num_envs, cameras=("top",), image_size=16))


def world_sim(videos: VideoDataset, num_envs: int, model=None, judge=None, **config) -> WorldSim:
    """Returns the toy inside a model of it."""
    model, task = model or TrueWorld(videos.spec), real()
    starts = SimInitialStates(task, videos.spec)
    rules = WorldSimConfig(**config)
    return WorldSim(model, judge or TrueJudge(), starts, task.spec, num_envs=num_envs, config=rules, rows=4)


def test_world_sim_satisfies_the_simulator_contract(videos):
    model = small_world(videos)
    config = {"max_episode_steps": 9, "success": 0.6}
    make = lambda count: world_sim(videos, count, model, model.judge, **config)  # noqa: E731
    assert check_simulator(make(3), make) == []


def test_true_world_model_reproduces_the_simulator_result_of_every_episode(videos):
    for make in (lambda: ExpertActor(PushExpert()), RandomActor):
        expected = evaluate(make(), real(4), episodes=12, seed=50)
        found = evaluate(make(), world_sim(videos, 3), episodes=12, seed=50)
        assert found.success is not None and expected.success is not None
        assert found.success.tolist() == expected.success.tolist()
        assert found.lengths.tolist() == expected.lengths.tolist()
        assert found.returns.tolist() == expected.returns.tolist()


def guarded(videos: VideoDataset, gate: OODDetector, num_envs: int = 3, **config) -> WorldSim:
    task = real()
    rules = WorldSimConfig(**config)
    starts = SimInitialStates(task, videos.spec)
    model = TrueWorld(videos.spec)
    return WorldSim(
        model, TrueJudge(), starts, task.spec, num_envs=num_envs, config=rules, rows=4, guard=OODTermination(gate, 7.0)
    )


def still_data() -> Episodes:
    """Returns episodes at random positions with almost no movement."""
    rng = np.random.default_rng(0)
    places = rng.uniform(-1.5, 1.5, (300, 4)).astype(np.float32)
    arrays = {"gripper": places[:, :2], "block": places[:, 2:], "action": rng.normal(0, 0.01, (300, 2)).astype("f4")}
    whole = Episode(arrays)
    return Episodes.from_list(
        [Episode({key: v[i : i + 10] for key, v in whole.arrays.items()}) for i in range(0, 300, 10)], 0.1
    )


def test_leaving_the_data_support_terminates_the_episode_with_a_penalty(videos):
    gate = fit_ood_detector(still_data(), OODDetectorConfig(outside=0.0))
    sim, free = guarded(videos, gate), world_sim(videos, 3)
    obs = sim.reset(0)
    free.reset(0)
    quiet, loud = torch.zeros(3, 2), torch.zeros(3, 2)
    loud[1] = 1.0
    for _ in range(2):
        step, other = sim.step(quiet), free.step(quiet)
        assert not step.terminated.any() and torch.equal(step.reward, other.reward)
        assert "reward.outside" not in other.info and step.info["reward.outside"].eq(0).all()
    step, other = sim.step(loud), free.step(loud)
    assert step.terminated.tolist() == [False, True, False] and not other.terminated.any()
    assert step.info["reward.outside"].tolist() == [0.0, -7.0, 0.0]
    assert torch.equal(step.reward, other.reward + step.info["reward.outside"])
    assert sim.episode_step.tolist() == [3, 0, 3] and set(obs) == set(step.obs)


def test_guarded_world_satisfies_the_simulator_contract(videos):
    gate = fit_ood_detector(still_data(), OODDetectorConfig(kind="neighbours"))
    make = lambda count: guarded(videos, gate, count, max_episode_steps=9)  # noqa: E731
    assert check_simulator(make(3), make) == []


def test_guard_with_unobserved_keys_is_refused(videos):
    gate = fit_ood_detector(still_data(), keys=["gripper"])
    assert guarded(videos, gate, 1).guard is not None
    gate.keys = ("gripper", "elbow")
    with pytest.raises(UserError, match="'elbow' is not observed"):
        guarded(videos, gate, 1)


def test_evaluation_in_the_model_does_not_depend_on_the_number_of_environments(videos):
    spec = PolicySpec({"image.top": (3, 16, 16), "gripper": (2,)}, action_dim=2, horizon=4, action_horizon=2)
    policy = GaussianPolicy(GaussianConfig(normalization="identity", hidden=(8,)), spec)
    model = small_world(videos)
    results = [
        SimEvaluator(world_sim(videos, count, model, model.judge, max_episode_steps=6, success=2.0))(policy, range(5))
        for count in (2, 3)
    ]
    assert results[0].returns.tolist() == results[1].returns.tolist()
    assert results[0].lengths.tolist() == [6] * 5


def test_logged_starts_are_selected_by_their_seeds(videos):
    found = LoggedInitialStates(videos.episodes, videos.spec)([3, 1003])
    start = int(videos.episodes.starts[3])
    assert (found.images["top"][0] == videos.images["top"][start]).all()  # every frame of the context
    assert (found.proprio[0] == videos.proprio[start]).all() and not found.actions.any()
    assert torch.equal(found.proprio[1], found.proprio[0])  # 1003 modulo 8 episodes
    simulated = SimInitialStates(real(), videos.spec)([3])
    assert torch.equal(simulated.images["top"][0], found.images["top"][0])
    assert torch.equal(simulated.proprio[0], found.proprio[0])


def test_starts_anywhere_continue_from_frames_of_a_video(videos):
    starts = LoggedInitialStates(videos.episodes, videos.spec, anywhere=True)
    found, again = starts(range(40)), starts([7])
    assert torch.equal(again.proprio[0], found.proprio[7])  # the start depends on the seed only
    moved = (found.proprio[:, 1:] != found.proprio[:, :-1]).any(2)  # (40, C - 1)
    assert bool(moved.any()) and not bool((moved & ~found.actions.any(2)).any())  # no frame moves without its action
    index = [int((videos.proprio == row).all(1).nonzero()[0]) for row in found.proprio[:, -1]]
    assert len(set(index)) > 20 and not videos.success[index].any()


def test_uncertainty_lowers_the_reward_and_truncates_episodes(videos):
    class Doubtful(TrueWorld):
        def step(self, state, actions):
            after, frames = super().step(state, actions)
            return after, replace(frames, uncertainty=0.25 * after.steps[:, None].float())

    sim = world_sim(videos, 2, Doubtful(videos.spec), penalty=2.0, max_uncertainty=0.6)
    sim.reset(0)
    steps = [sim.step(torch.zeros(2, 2)) for _ in range(3)]
    assert [step.reward.tolist() for step in steps] == [[-0.5] * 2, [-1.0] * 2, [-1.5] * 2]
    assert [step.truncated.tolist() for step in steps] == [[False] * 2, [False] * 2, [True] * 2]


def test_shaped_rewards_sum_to_the_progress(videos):
    sim = world_sim(videos, 1, reward="shaped", ends_on_success=False)
    obs, total = sim.reset(7), 0.0
    first = TrueJudge()({}, torch.cat([obs["gripper"], obs["block"]], 1)[:, None]).progress
    for _ in range(10):
        step = sim.step(PushExpert()(sim, obs))
        obs, total = step.obs, total + float(step.reward - step.info["success"].float())
    assert total == pytest.approx(float(step.info["progress"] - first), abs=1e-5)


def test_abstaining_judge_reports_no_success(videos):
    class AbstainingJudge(TrueJudge):
        def __call__(self, images, proprio):
            return replace(super().__call__(images, proprio), uncertain=torch.ones(len(proprio), dtype=torch.bool))

    sim = world_sim(videos, 4, judge=AbstainingJudge())
    result = evaluate(ExpertActor(PushExpert()), sim, episodes=4)
    assert result.success is not None and not result.success.any()
    assert sim.num_scored == sim.num_abstained == result.lengths.sum()
    assert abstention_notes("expert", sim) == [
        "expert: the judge abstained from 160 of 160 frames, none of which counts as success."
    ]
    assert abstention_notes("expert", world_sim(videos, 4)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_dim": 3}, "takes 3 action dimensions, but toy/push 2"),
        ({"fps": 5.0}, "runs at 5 Hz, but toy/push acts at 10 Hz"),
        ({"size": 32}, r"'image.top' of shape \(3, 32, 32\), but toy/push has \(3, 16, 16\)"),
        ({"cameras": ("side",)}, "'image.side' .* has nothing"),
        ({"proprio": ("state",)}, "predicts 'state', which toy/push does not have"),
        ({"proprio_dim": 5}, "have 5 entries, but the task has 4"),
    ],
)
def test_tasks_that_do_not_match_the_world_spec_are_refused(videos, change, message):
    with pytest.raises(UserError, match=message):
        SimInitialStates(real(), replace(videos.spec, **change))
