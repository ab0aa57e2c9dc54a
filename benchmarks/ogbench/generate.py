"""Generate OGBench play data with the plan oracles of the package, in the layout of OGBench's own files.

    python -m benchmarks.ogbench.generate scene-v0 --out ~/ogbench-data/scene-play-v0.npz --processes 2

Settings are those of OGBench's generation script for `play`: 1,000 episodes of 1,001 steps (cube-triple 3,000,
cube-quadruple 5,000), noise 0.1 smoothed with 0.5, and a new random target whenever the oracle has reached the last
one. Episode i depends on `--seed` and i alone, so that a killed run continues from its finished blocks, and the number of
processes does not matter.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle
from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle
from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle
from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle

EPISODES = {"cube-triple-v0": 3000, "cube-quadruple-v0": 5000}  # others 1,000
STEPS = 1001  # per episode; the last one only shows the last state
BLOCK = 10  # episodes per intermediate file
NOISE = {"noise": 0.1, "noise_smoothing": 0.5}
STACKING = {  # range of the probability of stacking, drawn once per episode
    "single": (0.0, 0.0),
    "double": (0.0, 0.25),
    "triple": (0.05, 0.35),
    "quadruple": (0.1, 0.5),
    "octuple": (0.0, 0.35),
}
CUBE_START = 14  # index of the position of the first cube in `qpos`

Arrays = dict[str, NDArray[Any]]


@cache
def make_env(name: str) -> Any:
    """Make one environment per process in data-collection mode."""
    import ogbench  # noqa: F401  registers its environments

    return gymnasium.make(name, terminate_at_goal=False, mode="data_collection", max_episode_steps=STEPS)


def make_oracles(env: Any, name: str) -> dict[str, Any]:
    """Make the noisy plan oracle of each kind of target that the environment has."""
    if "puzzle" in name:
        return {"button": ButtonPlanOracle(env=env, gripper_always_closed=True, **NOISE)}
    cube = {"cube": CubePlanOracle(env=env, **NOISE)}
    if "cube" in name:
        return cube
    others = {"button": ButtonPlanOracle, "drawer": DrawerPlanOracle, "window": WindowPlanOracle}
    return cube | {kind: oracle(env=env, **NOISE) for kind, oracle in others.items()}


def play_episode(name: str, seed: int) -> Arrays:
    """Generate one episode; in the scene, episodes whose cube leaves the visible region are repeated."""
    env = make_env(name)
    oracles = make_oracles(env, name)
    np.random.seed(seed)  # noqa: NPY002  the oracles use the global generator
    reset_seed: int | None = seed
    while True:
        arrays = _attempt(env, oracles, name, reset_seed)
        reset_seed = None
        if "scene" not in name or cube_stays_visible(arrays["qpos"]):
            return arrays


def cube_stays_visible(qpos: NDArray[Any]) -> bool:
    """Whether the cube of the scene stays in view in all states `(T, nq)`, except inside the drawer."""
    y, z = qpos[:, CUBE_START + 1], qpos[:, CUBE_START + 2]
    too_far_left = (y <= -0.3) & ((z < 0.06) | (z > 0.08))
    return not bool((y >= 0.29).any() or too_far_left.any())


def _attempt(env: Any, oracles: dict[str, Any], name: str, seed: int | None) -> Arrays:
    obs, info = env.reset(seed=seed)
    size = next((size for size in STACKING if size in name), None)
    stacking = 0.5 if size is None else np.random.uniform(*STACKING[size])  # noqa: NPY002
    agent = oracles[info["privileged/target_task"]]
    agent.reset(obs, info)
    frames: dict[str, list[Any]] = {}
    done = False
    while not done:
        action = np.clip(np.array(agent.select_action(obs, info)), -1, 1)
        next_obs, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated
        if agent.done:
            agent_obs, agent_info = env.unwrapped.set_new_target(p_stack=stacking)
            agent = oracles[agent_info["privileged/target_task"]]
            agent.reset(agent_obs, agent_info)
        frame = {"observations": obs, "actions": action, "terminals": done}
        frame |= {"qpos": info["prev_qpos"], "qvel": info["prev_qvel"]}
        if "prev_button_states" in info:
            frame["button_states"] = info["prev_button_states"]
        for key, value in frame.items():
            frames.setdefault(key, []).append(value)
        obs = next_obs
    dtypes = {"terminals": np.bool_, "button_states": np.int64}
    return {key: np.array(values, dtypes.get(key, np.float32)) for key, values in frames.items()}


def _write_block(name: str, seed: int, folder: Path, first: int, last: int) -> int:
    """Write the episodes `first` to `last` - 1, unless they exist; return their number."""
    path = folder / f"{first:05d}.npz"
    if not path.exists():
        episodes = [play_episode(name, seed + index) for index in range(first, last)]
        part = folder / f"{first:05d}.part.npz"
        np.savez_compressed(part, **{key: np.concatenate([each[key] for each in episodes]) for key in episodes[0]})
        part.rename(path)
    return last - first


def generate(name: str, out: Path, episodes: int, seed: int, processes: int) -> None:
    """Write `episodes` to `out`, and a tenth as many for validation to `*-val.npz`."""
    folder = out.with_suffix(".blocks")
    folder.mkdir(parents=True, exist_ok=True)
    total, start, done = episodes + episodes // 10, monotonic(), 0
    firsts = range(0, total, BLOCK)
    lasts = [min(first + BLOCK, total) for first in firsts]
    with ProcessPoolExecutor(processes) as pool:
        for count in pool.map(partial(_write_block, name, seed, folder), firsts, lasts):
            done += count
            print(f"{name}: {done}/{total} episodes in {monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    blocks = [np.load(folder / f"{first:05d}.npz") for first in firsts]
    for path, rows in ((out, slice(0, episodes * STEPS)), (out.with_name(f"{out.stem}-val.npz"), slice(episodes * STEPS, None))):
        arrays = {key: np.concatenate([block[key] for block in blocks])[rows] for key in blocks[0].files}
        np.savez_compressed(path, **arrays)
    shutil.rmtree(folder)


def main() -> None:
    """Generate the data named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("env", help="environment of OGBench, e.g. scene-v0, puzzle-3x3-v0, cube-double-v0")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="file to write")
    parser.add_argument("--episodes", type=int, help="default: as in the published data")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first episode (default: 0)")
    parser.add_argument("--processes", type=int, default=1, help="default: 1")
    args = parser.parse_args()
    generate(args.env, args.out, args.episodes or EPISODES.get(args.env, 1000), args.seed, args.processes)


if __name__ == "__main__":
    main()
