"""Env steps per second of HalfCheetah-v5: our native backend, EnvPool, gymnasium's SyncVectorEnv and AsyncVectorEnv.

    python -m benchmarks.sim_throughput --quick      # under a minute
    python -m benchmarks.sim_throughput              # about 4 minutes

All backends simulate the same model with the same observation, reward and automatic resets, driven by the same random
actions. They alternate in short slots within one run, in rotating order, so that a drift of the machine's speed affects
all of them; `vs_*` is the median over the turns of our rate divided by the other (`low`, `high`: the extremes). Our
backend receives and returns torch tensors, the others numpy arrays, as in normal use. Run it on an idle machine: a
program that occupies a core halves the speed of the parallel backends and does not affect SyncVectorEnv.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import brackets, print_result, write_result
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.sim.vector_env import core_count

ENV_ID, TASK = "HalfCheetah-v5", "locomotion/half_cheetah"
ACTION_DIM = 6
OURS = "robopolicy rollout"
RIVALS = {"vs_envpool": "EnvPool", "vs_sync": "SyncVectorEnv", "vs_async": "AsyncVectorEnv"}

Play = Callable[[int], None]
"""Advance all environments by one step, with action batch i."""


def native(num_envs: int, actions: NDArray[np.float32], backend: str) -> tuple[Play, Callable[[], object]]:
    """One of our own backends through the vector-simulator contract."""
    sim = make_sim(TASK, SimOptions(num_envs=num_envs, backend=backend))
    sim.reset(0)
    ring = torch.from_numpy(actions)
    return lambda i: void(sim.step(ring[i % len(ring)])), sim.close


def envpool(num_envs: int, actions: NDArray[np.float32]) -> tuple[Play, Callable[[], object]]:
    """EnvPool with one thread per core."""
    import envpool

    pool = envpool.make(ENV_ID, env_type="gymnasium", num_envs=num_envs, num_threads=core_count(), seed=0)
    pool.reset()
    ring = actions.astype(np.float64)
    return lambda i: void(pool.step(ring[i % len(ring)])), pool.close


def vectorised(
    num_envs: int, actions: NDArray[np.float32], mode: gymnasium.VectorizeMode
) -> tuple[Play, Callable[[], object]]:
    """Gymnasium's own vector environments."""
    env = gymnasium.make_vec(ENV_ID, num_envs=num_envs, vectorization_mode=mode)
    env.reset(seed=0)
    return lambda i: void(env.step(actions[i % len(actions)])), env.close


def void(_: object) -> None:
    """Drop a result."""


def measure(num_envs: int, turns: int, seconds: float) -> dict[str, NDArray[np.float64]]:
    """Env steps per second of every backend in every turn."""
    actions = np.random.default_rng(0).uniform(-1, 1, (128, num_envs, ACTION_DIM)).astype(np.float32)
    contestants = {
        OURS: native(num_envs, actions, "mujoco"),
        "robopolicy exact": native(num_envs, actions, "mujoco-exact"),
        "EnvPool": envpool(num_envs, actions),
        "EnvPool as robopolicy backend": native(num_envs, actions, "envpool"),
        "SyncVectorEnv": vectorised(num_envs, actions, gymnasium.VectorizeMode.SYNC),
        "AsyncVectorEnv": vectorised(num_envs, actions, gymnasium.VectorizeMode.ASYNC),
    }
    rates = take_turns({name: play for name, (play, _) in contestants.items()}, num_envs, turns, seconds)
    for _, close in contestants.values():
        close()
    return rates


def take_turns(plays: Mapping[str, Play], num_envs: int, turns: int, seconds: float) -> dict[str, NDArray[np.float64]]:
    """Env steps per second of every entry of `plays` in every turn, in rotating order."""
    names = list(plays)
    rates = {name: np.zeros(turns) for name in names}
    for turn in range(-1, turns):  # turn -1 warms up and is not counted
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rate = run_slot(plays[name], num_envs, seconds)
            if turn >= 0:
                rates[name][turn] = rate
    return rates


def run_slot(play: Play, num_envs: int, seconds: float) -> float:
    """Step for `seconds` and return env steps per second."""
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        play(steps)
        steps += 1
    return steps * num_envs / elapsed


def summarise(rates: dict[str, NDArray[np.float64]]) -> tuple[list[dict[str, object]], dict[str, object]]:
    """Table rows and the figures `vs_*`."""
    rows: list[dict[str, object]] = []
    for name, rate in rates.items():
        ratio = rates[OURS] / rate
        rows.append(
            {
                "simulator": name,
                "env steps/s (median)": float(np.median(rate)),
                "smallest": float(rate.min()),
                "largest": float(rate.max()),
                "ours is faster by": f"{np.median(ratio):.2f}x [{ratio.min():.2f}, {ratio.max():.2f}]",
            }
        )
    figures: dict[str, object] = {"env_steps_per_second": float(np.median(rates[OURS]))}
    for figure, rival in RIVALS.items():
        ratio = rates[OURS] / rates[rival]
        figures[figure] = float(np.median(ratio))
        figures[f"{figure}_low"], figures[f"{figure}_high"] = float(ratio.min()), float(ratio.max())
    return rows, figures


def main() -> None:
    """Measure, print, and write the results of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 short turns, no results written")
    parser.add_argument("--num-envs", type=int, default=64, help="environments (default: 64)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    turns, seconds = (5, 0.8) if arguments.quick else (15, 2.5)
    rows, figures = summarise(measure(arguments.num_envs, turns, seconds))
    figures |= {"task": ENV_ID, "num_envs": arguments.num_envs, "turns": turns, "seconds_per_slot": seconds}
    print_result("sim_throughput", rows, figures)
    if not arguments.quick:
        write_result("sim_throughput", rows, figures, command="python -m benchmarks.sim_throughput", notes=[brackets()])


if __name__ == "__main__":
    main()
