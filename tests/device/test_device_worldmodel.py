"""Tests of world models on the simulated device: training, simulation and planning in large calls without waits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from budgets import check_budget
from small_world import CONFIG, small_films, small_run, small_world

from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.model_runs import resume_world, start_world
from robopolicy.worldmodel.backend import LoggedInitialStates, WorldSim, WorldSimConfig
from robopolicy.worldmodel.imagined import ImaginedPolicy, ShootingConfig, VideoDynamics
from robopolicy.worldmodel.latent import LatentWorldModel
from robopolicy.worldmodel.learner import LearnerConfig, StagedVideoSource, WorldLearner
from robopolicy.worldmodel.videos import VideoDataset

simulated = pytest.importorskip("simulated", exc_type=ImportError)


@pytest.fixture(scope="module")
def videos() -> VideoDataset:
    return small_films()


@pytest.fixture(scope="module")
def model(videos: VideoDataset) -> LatentWorldModel:
    """An untrained model with random output layers, on the device."""
    torch.manual_seed(0)
    world = small_world(videos)
    for layer in (world.denoiser.out, world.state.body[-1], world.outcome.judge[2]):
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return world.to(simulated.DEVICE)


def opened(videos: VideoDataset, model: LatentWorldModel, num_envs: int, **rules: object) -> WorldSim:
    task = make_sim("toy/push", SimOptions(1, cameras=("top",), image_size=16)).spec
    config = WorldSimConfig(max_episode_steps=6, success=0.55, reward="shaped", **rules)  # type: ignore[arg-type]
    return WorldSim(
        model, model.judge, LoggedInitialStates(videos.episodes, videos.spec), task, num_envs=num_envs, config=config
    )


# Before: 83 and 240 launches, 3 and 15 waits, with those for the batch. Each step of the state network adds 60.
@pytest.mark.parametrize("stage", ["autoencoder", "dynamics"])
def test_updates_do_not_wait(stage: str, videos: VideoDataset) -> None:
    config = LearnerConfig(autoencoder_updates=2 if stage == "autoencoder" else 1, updates=4)
    learner = WorldLearner(config, LatentWorldModel(CONFIG, videos.spec).to(simulated.DEVICE))
    source = StagedVideoSource(videos, simulated.DEVICE)
    while learner.stage != stage or not learner.updates:
        learner.update(source.next(learner))
    learner.update(source.next(learner)) if stage == "dynamics" else None  # the first one encodes the videos
    with simulated.record() as found:
        metrics = learner.update(source.next(learner))
    check_budget("worldmodel", stage, found.launches, found.waits, found)
    assert all(torch.isfinite(torch.as_tensor(value)) for value in metrics.values())


@pytest.mark.parametrize("num_envs", [16, 256])
def test_a_step_of_all_videos_waits_once(num_envs: int, videos: VideoDataset, model: LatentWorldModel) -> None:
    sim = opened(videos, model, num_envs)
    sim.reset(3)
    action = torch.zeros(num_envs, 2, device=simulated.DEVICE)
    for _ in range(6):  # before: 1,658 launches and 129 waits with 16 videos, 26,493 and 1,886 with 256
        with simulated.record() as found:
            step = sim.step(action)
        if step.done.any():
            break
    check_budget("worldmodel", "step", found.launches, found.waits, found)


@pytest.mark.parametrize("rules", [{}, {"every": 2, "clip": 2}], ids=["every step", "every second step"])
def test_world_models_on_a_device_satisfy_the_simulator_contract(
    rules: dict[str, int], videos: VideoDataset, model: LatentWorldModel
) -> None:
    make = lambda num_envs: opened(videos, model, num_envs, **rules)  # noqa: E731
    rounding = "The same episode differs with 1 and 3 environments"  # see the next test
    assert [problem for problem in check_simulator(make(3), make) if not problem.startswith(rounding)] == []


def test_a_video_depends_on_the_number_of_videos_only_by_rounding(
    videos: VideoDataset, model: LatentWorldModel
) -> None:
    action = torch.tensor([[0.3, -0.4]], device=simulated.DEVICE)
    steps = []
    for num_envs in (1, 5):
        sim = opened(videos, model, num_envs)
        sim.reset(4)
        steps.append(sim.step(action.expand(num_envs, -1)))
    for key, value in steps[0].final_obs.items():
        torch.testing.assert_close(steps[1].final_obs[key][:1].float(), value.float(), atol=1e-5, rtol=0)


def test_plans_do_not_wait(videos: VideoDataset, model: LatentWorldModel) -> None:
    observation = {key: tuple(entry.shape) for key, entry in opened(videos, model, 1).spec.observation.items()}
    policy = FlowPolicy(FlowConfig(steps=2), PolicySpec(observation, 2, 4, 4)).to(simulated.DEVICE)
    planner = ImaginedPolicy(policy, VideoDynamics(model, model.judge, observation), ShootingConfig(depth=2, rounds=1))
    obs = {key: torch.zeros(3, 1, *shape, device=simulated.DEVICE) for key, shape in observation.items()}
    obs |= {key: value.to(torch.uint8) for key, value in obs.items() if key.startswith("image.")}
    planner.act(obs)
    with simulated.record() as found:
        chunk = planner.act(obs)
    assert chunk.shape == (3, 4, 2)
    check_budget("worldmodel", "plan", found.launches, found.waits, found)


def test_a_run_on_the_device_resumes_exactly(tmp_path: Path) -> None:
    rows: list[list[object]] = []
    for stop in (0, 8):
        config = replace(small_run(tmp_path), device=simulated.NAME, name=f"run{stop}")
        trainer = start_world(config)
        if stop:
            while trainer.update <= stop:
                trainer._iterate()
            trainer.close()
            trainer = resume_world(tmp_path / config.name)
        trainer.train()
        rows.append(list(map(json.loads, (tmp_path / config.name / "metrics.jsonl").read_text().splitlines())))
    assert rows[0] == rows[1]
