"""The simulators of a run, by its configuration: the one that is learnt in, and the one that judges."""

from __future__ import annotations

from dataclasses import replace

from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, WorldOptions
from robopolicy.sim.wrappers.registry import evaluation_wrappers
from robopolicy.training.config import TrainConfig
from robopolicy.training.world_sims import is_world, open_task


def simulator(config: TrainConfig, num_envs: int) -> VectorSim:
    """The simulator to learn in."""
    options = SimOptions(
        num_envs=num_envs,
        backend=config.sim.backend,
        device=config.device,
        cameras=config.task.cameras,
        image_size=config.task.image_size,
        point_clouds=config.task.point_clouds,
        points=config.task.points,
        reward=config.task.reward,
        wrappers=config.task.wrappers,
        threads=config.sim.threads,
        world=config.world if is_world(config.sim.backend) else WorldOptions(),
    )
    return open_task(config.task.name, options)


def eval_simulator(config: TrainConfig) -> VectorSim:
    """The simulator that judges a run: the true one where the run learns in a world model, unless it asks for that.

    A world model judges whole episodes from the task's own starts, whatever is learnt in it.
    """
    backend = config.evaluation.backend or ("auto" if is_world(config.sim.backend) else config.sim.backend)
    world = WorldOptions(judge=config.world.judge, every=config.world.every)
    task = replace(config.task, wrappers=evaluation_wrappers(config.task.wrappers))
    judging = replace(config, task=task, sim=replace(config.sim, backend=backend), world=world)
    return simulator(judging, config.evaluation.num_envs)
