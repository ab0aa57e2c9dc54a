"""OGBench play data from the plan oracles of the package, in the layout of OGBench's own files."""

from __future__ import annotations

import shutil
import sys
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

from robopolicy.training.parallel import parallel_map

LARGE = {"cube-triple-v0": 3000, "cube-quadruple-v0": 5000, "puzzle-4x5-v0": 3000, "puzzle-4x6-v0": 5000}
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


def published_episodes(name: str) -> int:
    """Episodes of the published play data of an environment, without those for validation."""
    return LARGE.get(name, 1000)


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
    np.random.seed(seed)  # the oracles use the global generator
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
    stacking = 0.5 if size is None else np.random.uniform(*STACKING[size])
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


def block_path(folder: Path, span: range) -> Path:
    """File of the episodes `span`."""
    return folder / f"{span.start:05d}.npz"


def write_block(name: str, seed: int, folder: Path, span: range) -> None:
    """Write the episodes `span`, unless they exist."""
    folder.mkdir(parents=True, exist_ok=True)
    path = block_path(folder, span)
    if not path.exists():
        episodes = [play_episode(name, seed + index) for index in span]
        part = path.with_suffix(".part.npz")
        _save(part, {key: np.concatenate([each[key] for each in episodes]) for key in episodes[0]})
        part.rename(path)


def generate(name: str, out: Path, episodes: int, seed: int, processes: int) -> None:
    """Write `episodes` to `out`, and a tenth as many for validation to `*-val.npz`."""
    folder = out.with_suffix(".blocks")
    total, start, done = episodes + episodes // 10, monotonic(), 0
    spans = [range(first, min(first + BLOCK, total)) for first in range(0, total, BLOCK)]
    for span, future in parallel_map(partial(write_block, name, seed, folder), spans, jobs=processes):
        future.result()
        done += len(span)
        print(f"{name}: {done}/{total} episodes in {monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    blocks = [np.load(block_path(folder, span)) for span in spans]
    arrays = {key: np.concatenate([block[key] for block in blocks]) for key in blocks[0].files}
    train = int(np.flatnonzero(arrays["terminals"])[episodes - 1]) + 1
    _save(out.with_name(f"{out.stem}-val.npz"), {key: array[train:] for key, array in arrays.items()})
    _save(out, {key: array[:train] for key, array in arrays.items()})
    shutil.rmtree(folder)


def _save(path: Path, arrays: dict[str, Any]) -> None:
    np.savez_compressed(path, **arrays)
