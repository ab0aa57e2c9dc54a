"""Time to write a step of all environments to a replay buffer and to draw a batch, compared with Stable-Baselines3's.

    python -m benchmarks.replay --quick            # few turns, nothing written
    python -m benchmarks.replay                    # one core, one minute
    python -m benchmarks.replay --device cuda      # the buffer on a GPU; written to replay_cuda

Observations have 48 numbers and actions 12, as a quadruped's. A buffer is filled once before it is timed, one in 500
steps ends an episode, and the buffers alternate, so that a drift of the machine's speed affects all. Stable-Baselines3
stores both observations of a step and knows no n-step return, chunk or history. Times are medians: of processor time on
the CPU, which other programs disturb less, and of time until the device has finished on a device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box

from benchmarks.common import print_result, write_result
from robopolicy.data.batches import ReplaySampleSpec
from robopolicy.data.replay import Replay
from robopolicy.device import CPU, usable_device

OBS, ACTION, ENDS = 48, 12, 0.002
KINDS: dict[str, dict[str, Any]] = {
    "one step": {},
    "3-step return": {"steps": 3},
    "prioritised": {},
    "chunks of 8": {"horizon": 8, "steps": 8},
}
SIZES = ((4096, 32_768, 1_000_000), (16, 256, 100_000), (1, 256, 20_000))  # environments, rows of a batch, capacity
PEER = "Stable-Baselines3"
Work = dict[str, Callable[[], object]]


def ours(kind: str, envs: int, batch: int, device: torch.device, capacity: int) -> Work:
    """Writing and drawing of our buffer, which is full."""
    replay = Replay(capacity, envs, prioritized=0.6 * (kind == "prioritised"), device=device)
    generator = torch.Generator(device).manual_seed(0)
    lanes, obs = torch.arange(envs, device=device), {"state": torch.randn(envs, OBS, device=device)}
    action, reward = torch.randn(envs, ACTION, device=device), torch.randn(envs, device=device)
    ends = torch.rand(256, envs, device=device, generator=generator) < ENDS
    never, written = torch.zeros_like(ends[0]), iter(range(10**9))
    spec = ReplaySampleSpec(**{"batch_size": batch, "horizon": 1, "steps": 1, "gamma": 0.99, **KINDS[kind]})

    def add() -> None:
        replay.add(lanes, obs, action, reward, ends[next(written) % len(ends)], never, obs)

    for _ in range(capacity // envs):
        add()
    return {"add": add, "sample": lambda: replay.sample(spec, generator)}


def stable_baselines(envs: int, batch: int, capacity: int) -> Work:
    """Writing and drawing of Stable-Baselines3's buffer."""
    from stable_baselines3.common.buffers import ReplayBuffer

    spaces = Box(-1, 1, (OBS,)), Box(-1, 1, (ACTION,))
    buffer = ReplayBuffer(capacity, *spaces, device="cpu", n_envs=envs)
    obs, action = np.ones((envs, OBS), np.float32), np.ones((envs, ACTION), np.float32)
    reward, done, info = np.ones(envs, np.float32), np.zeros(envs), [dict[str, Any]() for _ in range(envs)]

    def add() -> None:
        buffer.add(obs, obs, action, reward, done, info)

    for _ in range(capacity // envs):
        add()
    return {"add": add, "sample": lambda: buffer.sample(batch)}


def measure(works: dict[str, Work], device: torch.device, turns: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of every entry, after two turns of warm-up."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    seconds = {name: {part: list[float]() for part in work} for name, work in works.items()}
    for turn in range(turns + 2):
        for name, work in works.items():
            for part, call in work.items():
                start = clock()
                call()
                if device.type != "cpu":
                    torch.get_device_module(device).synchronize(device)
                if turn > 1:
                    seconds[name][part].append(clock() - start)
    return {name: {part: 1e3 * median(taken) for part, taken in parts.items()} for name, parts in seconds.items()}


def compare(
    device: torch.device, sizes: tuple[tuple[int, int, int], ...], turns: int
) -> tuple[list[dict[str, object]], dict[str, Any]]:
    """Rows and figures of all sizes."""
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {}
    for envs, batch, capacity in sizes:
        works = {kind: ours(kind, envs, batch, device, capacity) for kind in KINDS}
        works[PEER] = stable_baselines(envs, batch, capacity)
        found = measure(works, device, turns if envs > 100 else 20 * turns)
        for name, times in found.items():
            label = {"environments": envs, "rows": batch, "windows": name}
            rows.append({**label, "ms to write a step": times["add"], "ms to draw": times["sample"]})
        figures[str(envs)] = found
    return rows, figures


def main() -> None:
    """Measure, print, and write the results of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 turns, no results written")
    parser.add_argument("--device", default="cpu", help="device of our buffer (default: cpu)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = usable_device(arguments.device)
    rows, figures = compare(device, SIZES, 5 if arguments.quick else 25)
    name = "replay" if device == CPU else f"replay_{device.type}"
    print_result(name, rows, figures)
    if not arguments.quick:
        command = "python -m benchmarks.replay" + ("" if device == CPU else f" --device {arguments.device}")
        write_result(name, rows, figures, command=command)


if __name__ == "__main__":
    main()
