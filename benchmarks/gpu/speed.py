"""Steps that measure speed: environments, PPO and rsl_rl, settings of networks, cameras, replay and world models."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from benchmarks import replay as replay_benchmark
from benchmarks import rsl_rl, world_throughput
from benchmarks.common import Row
from benchmarks.gpu.records import Options, one_line
from benchmarks.sim_throughput import take_turns
from robopolicy.cli.main import main as command_line
from robopolicy.device import usable_device
from robopolicy.sim.backends.isaac_style import IsaacStyleSim
from robopolicy.sim.backends.warp import WarpSim
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.build import build, resolve_config
from robopolicy.training.compose import compose_config

SIZES = (256, 1024, 4096, 8192)
TASKS = {"mjlab/go1_flat": "mjlab", "half_cheetah": "warp", "lift": "warp", "velocity/go1": "warp"}
NETWORKS = {  # learners on the point mass, with networks and batches of GPU runs
    "PPO, 512-256-128, batch 24,576": [
        *("policy=gaussian", "policy.hidden=[512,256,128]", "algorithm=ppo", "algorithm.critic.hidden=[512,256,128]"),
        *("sim.num_envs=4096", "algorithm.num_steps=24", "algorithm.batch_size=24576", "algorithm.epochs=5"),
    ],
    "SAC, 512-512, batch 8,192": [
        *("policy=squashed_gaussian", "policy.normalization=identity", "policy.hidden=[512,512]", "algorithm=sac"),
        *("algorithm.critic.hidden=[512,512]", "algorithm.batch_size=8192", "sim.num_envs=1024"),
        *("replay.learning_starts=16384", "algorithm.gradient_steps=4"),
    ],
    "flow, 3 x 1,024, batch 4,096": [
        *("policy=flow", "policy.hidden=[1024,1024,1024]", "algorithm=bc", "algorithm.batch_size=4096"),
    ],
}
TINY = {"policy.hidden": "[8]", "algorithm.critic.hidden": "[8]", "algorithm.batch_size": "16", "sim.num_envs": "4"}
TINY |= {"replay.learning_starts": "32"}
SETTINGS = {
    "float32": [],
    "gpu.tf32": ["gpu.tf32=true"],
    "gpu.compile=default": ["gpu.compile=default"],
    "gpu.tf32, gpu.compile=reduce-overhead": ["gpu.tf32=true", "gpu.compile=reduce-overhead"],
}


def calls_per_second(call: Callable[[], object], options: Options, seconds: float = 2.0) -> float:
    """Calls per second until the device has finished, after some that are not counted."""
    for _ in range(1 if options.quick else 10):
        call()
    count, start = 0, finished(options.device)
    while True:
        for _ in range(1 if options.quick else 10):
            call()
            count += 1
        if options.quick or time.perf_counter() - start > seconds:
            return count / (finished(options.device) - start)


def finished(device: str) -> float:
    """Time [s] once the device has finished."""
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()


def used_memory(device: str) -> float:
    """Memory of the GPU in use [MiB], which counts Warp's too; 0 on the CPU."""
    if torch.device(device).type != "cuda":
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def throughput(options: Options) -> Iterator[Row]:
    """Control steps per second with random actions: the full step, and its physics without the rest."""
    for task in ("half_cheetah",) if options.quick else TASKS:
        for num_envs in (8,) if options.quick else SIZES:
            label: dict[str, object] = {"task": task, "environments": num_envs}
            try:
                yield {
                    **label,
                    **rates(task, SimOptions(num_envs, backend=TASKS[task], device=options.device), options),
                }
            except Exception as error:  # the other tasks are still measured
                yield {**label, "note": one_line(error)}
                break


def rates(task: str, at: SimOptions, options: Options) -> dict[str, object]:
    """Rates of one task with one number of environments, and the memory of its simulator and kernels."""
    before = used_memory(at.device)
    sim = make_sim(task, at)
    sim.reset(0)
    actions = 2 * torch.rand(at.num_envs, sim.spec.action_dim, device=at.device) - 1
    full = calls_per_second(partial(sim.step, actions), options)
    memory = used_memory(at.device) - before
    physics = calls_per_second(bare_physics(sim), options)
    sim.close()
    return {
        "full step [env steps/s]": full * at.num_envs,
        "physics [env steps/s]": physics * at.num_envs,
        "ms per step": 1e3 / full,
        "ms of physics": 1e3 / physics,
        "memory [MiB]": memory,
    }


def bare_physics(sim: VectorSim) -> Callable[[], object]:
    """The physics of one control step under constant controls."""
    if isinstance(sim, WarpSim):
        control = torch.zeros(sim.num_envs, sim.task.model.nu, device=sim.device)
        return lambda: sim._physics.advance(control)
    assert isinstance(sim, IsaacStyleSim)
    simulation, substeps = sim.env.sim, sim.env.cfg.decimation

    def advance() -> None:
        for _ in range(substeps):
            simulation.step()

    return advance


def ppo(options: Options) -> Iterator[Row]:
    """Our PPO and rsl_rl's on mjlab's Go1, seed by seed."""
    torch.set_num_threads(1)
    num_envs, iterations = (4, 1) if options.quick else (4096, 15)
    env_id = rsl_rl.CONTESTS[0 if options.quick else 1].env_id
    learners = {rsl_rl.OURS: rsl_rl.train_ours, "rsl_rl": rsl_rl.train_theirs}
    for seed in (0,) if options.quick else (-1, 0, 1):  # seed -1 loads the kernels
        for name, train in learners.items():
            contest = rsl_rl.Contest(env_id, iterations if seed >= 0 else 2, seeds=1)
            made = train(contest, max(seed, 0), num_envs, options.device)
            if seed >= 0:
                yield {
                    "learner": name,
                    "seed": seed,
                    "environments": num_envs,
                    "s per iteration": made.wall,
                    "simulating [s]": made.simulating,
                    "rest of the rollout [s]": made.outside - made.updating,
                    "updating [s]": made.updating,
                    "iterations/s": 1 / made.wall,
                }


def settings(options: Options) -> Iterator[Row]:
    """Time of an update with TF32 and compilation, compared with plain float32."""
    demos = options.work / "point_mass_demos"
    shutil.rmtree(demos, ignore_errors=True)
    command_line(["collect", "toy/point_mass", "--episodes", "2" if options.quick else "100", "--out", str(demos)])
    for learner, words in NETWORKS.items():
        plain = 0.0
        for name, changed in list(SETTINGS.items())[: 2 if options.quick else None]:
            torch._dynamo.reset()
            dataset = [f"dataset={demos}"] if "algorithm=bc" in words else []
            try:
                ms, first = update_time([*words, *changed, *dataset], options)
            except Exception as error:  # the other settings are still measured
                yield {"learner": learner, "setting": name, "note": one_line(error)}
                continue
            plain = plain or ms
            yield {"learner": learner, "setting": name, "ms": ms, "faster": plain / ms, "first updates [s]": first}


def update_time(words: list[str], options: Options) -> tuple[float, float]:
    """Median time of an update [ms] on one batch, and of the first three together [s]."""
    if options.quick:
        words = [f"{key}={TINY.get(key, value)}" for key, value in (word.split("=", 1) for word in words)]
    sizes = ["task=point_mass", "budget.updates=100", "evaluation.episodes=0", f"device={options.device}"]
    parts = build(resolve_config(compose_config([*words, *sizes])))
    batch = parts.source.next(parts.algorithm)
    start = finished(options.device)
    for _ in range(1 if options.quick else 3):
        parts.algorithm.update(batch)
    times = [finished(options.device)]
    first = times[0] - start
    for _ in range(1 if options.quick else 20):
        parts.algorithm.update(batch)
        times.append(finished(options.device))
    parts.close()
    return 1e3 * median(b - a for a, b in pairwise(times)), first


def cameras(options: Options) -> Iterator[Row]:
    """Images per second of lift on Warp, the step included."""
    for size, num_envs in ((16, 2),) if options.quick else ((64, 256), (64, 1024), (64, 4096), (128, 1024)):
        at = SimOptions(num_envs, backend="warp", device=options.device, cameras=("front",), image_size=size)
        before = used_memory(options.device)
        sim = make_sim("lift", at)
        sim.reset(0)
        actions = torch.zeros(num_envs, sim.spec.action_dim, device=options.device)
        rate = calls_per_second(partial(sim.step, actions), options) * num_envs
        memory = used_memory(options.device) - before
        sim.close()
        yield {"pixels": size, "environments": num_envs, "images/s": rate, "memory [MiB]": memory}


def replay(options: Options) -> Iterator[Row]:
    """Time to write and to draw from a replay buffer on the device."""
    sizes = ((8, 16, 800),) if options.quick else replay_benchmark.SIZES[:1]
    yield from replay_benchmark.compare(usable_device(options.device), sizes, 1 if options.quick else 25)[0]


def worldmodel(options: Options) -> Iterator[Row]:
    """Frames per second of the embedded world models and of the simulator that they replace."""
    shown, models = world_throughput.TASKS[0], world_throughput.MODELS[: 1 if options.quick else None]
    for num_envs in (2,) if options.quick else (64, 512):
        sims: dict[str, Any] = world_throughput.contestants(shown, num_envs, models, options.device)
        players = {name: world_throughput.player(sim) for name, sim in sims.items()}
        turns, seconds = (1, 0.05) if options.quick else (3, 0.8)
        found = take_turns(players, num_envs, turns, seconds)
        yield from world_throughput.rows_of(found, task=shown.task, environments=num_envs)
        for sim in sims.values():
            sim.close()
