"""Predicted frames per second of the embedded world models, compared with the simulators that they replace.

    python -m benchmarks.world_throughput --quick             # under a minute, nothing written
    python -m benchmarks.world_throughput                     # about 10 minutes; run it on an idle machine
    python -m benchmarks.world_throughput --device cuda       # where there is a GPU

A frame is one control step of one environment: the prediction of the network, decoded, checked for success, and
returned as an observation. The simulators run the same random actions in the same number of environments, with and
without rendering the frame that the world model predicts. All of them alternate in short slots within one run, in
rotating order; a cell is the median over the turns, [low, high] are the extremes, and `cost` is the time of a frame
relative to the simulator without rendering (`cost, drawn`: with rendering). Weights are random, which costs the same as
trained weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common import brackets, print_result, write_result
from benchmarks.sim_throughput import Play, take_turns
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.sim.vector_env import core_count
from robopolicy.worldmodel.backend import SimInitialStates, WorldSim
from robopolicy.worldmodel.contract import WorldSpec
from robopolicy.worldmodel.latent import PRESETS, LatentWorldModel, LatentWorldModelConfig

NOTES = [
    brackets(),
    "`cost` is the time of a frame in units of the simulator, and of the simulator that draws (`cost, drawn`).",
]


@dataclass(frozen=True)
class Shown:
    """A task with the camera and proprioception of its world models in `benchmarks.worldmodel`."""

    task: str
    camera: str
    proprio: tuple[str, ...]


TASKS = (Shown("toy/push", "top", ("gripper", "block")), Shown("manipulation/lift", "front", ("state",)))
MODELS = (("smoke", 32), ("tiny", 64), ("small", 64))  # presets with their image sizes
SIMULATOR, DRAWN = "simulator", "simulator, drawn"


def world(shown: Shown, config: LatentWorldModelConfig, pixels: int, num_envs: int, device: str) -> WorldSim:
    """A world model with random weights as a simulator."""
    real = make_sim(shown.task, SimOptions(num_envs=1, cameras=(shown.camera,), image_size=pixels))
    size = sum(int(np.prod(real.spec.observation[name].shape)) for name in shown.proprio)
    spec = WorldSpec(
        cameras=(shown.camera,),
        size=pixels,
        fps=1 / real.spec.control_dt,
        action_dim=real.spec.action_dim,
        proprio_dim=size,
        proprio=shown.proprio,
    )
    torch.manual_seed(0)
    model = LatentWorldModel(config, spec).eval().to(device)
    return WorldSim(model, model.judge, SimInitialStates(real, spec), real.spec, num_envs=num_envs, rows=config.rows)


def contestants(shown: Shown, num_envs: int, models: Sequence[tuple[str, int]], device: str) -> dict[str, VectorSim]:
    """The simulator without and with rendering, and the world models; on a GPU they predict all rows at once."""
    views = {"cameras": (shown.camera,), "image_size": 64}
    found = {
        SIMULATOR: make_sim(shown.task, SimOptions(num_envs=num_envs)),
        DRAWN: make_sim(shown.task, SimOptions(num_envs=num_envs, **views)),
    }
    for name, pixels in models:
        config = PRESETS[name] if device == "cpu" else replace(PRESETS[name], rows=num_envs)
        found[f"{name}, {pixels} pixels"] = world(shown, config, pixels, num_envs, device)
    return found


def player(sim: VectorSim) -> Play:
    """Random actions in `sim`; a step ends when the host has its result."""
    generator = torch.Generator().manual_seed(0)
    low, high = sim.spec.action_low, sim.spec.action_high
    ring = low + (high - low) * torch.rand(64, sim.num_envs, sim.spec.action_dim, generator=generator)
    sim.reset(0)
    return partial(_play, sim, ring)


def _play(sim: VectorSim, ring: torch.Tensor, i: int) -> None:
    with torch.no_grad():
        sim.step(ring[i % len(ring)]).done.cpu()


def rows_of(rates: dict[str, np.ndarray], **what: object) -> list[dict[str, object]]:
    """One row per simulator or world model."""
    return [
        {
            **what,
            "source": name,
            "frames/s": f"{np.median(rate):,.0f} [{rate.min():,.0f}, {rate.max():,.0f}]",
            "cost": _times(rates[SIMULATOR] / rate),
            "cost, drawn": _times(rates[DRAWN] / rate),
        }
        for name, rate in rates.items()
    ]


def _times(ratios: np.ndarray) -> str:
    middle = float(np.median(ratios))
    return f"{middle:,.0f}x" if middle >= 100 else f"{middle:.3g}x"


def main() -> None:
    """Measure, print, and write the results of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one task, one size, two models, no results written")
    parser.add_argument("--device", default="cpu", help="device of the world models: cpu or cuda")
    arguments = parser.parse_args()
    gpu = arguments.device != "cpu"
    tasks, models = (TASKS[:1], MODELS[:2]) if arguments.quick else (TASKS, MODELS)
    sizes = (8,) if arguments.quick else (64, 512) if gpu else (1, 8, 64)
    threads = (1,) if arguments.quick or gpu else (1, core_count())
    turns, seconds = (3, 0.5) if arguments.quick else (7, 0.8)
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name() if gpu else "cpu", "frames_per_second": {}}
    for shown in tasks:
        for num_envs in sizes:
            sims = contestants(shown, num_envs, models, arguments.device)
            for count in threads:
                torch.set_num_threads(count)
                plays = {name: player(sim) for name, sim in sims.items()}
                rates = take_turns(plays, num_envs, turns, seconds)
                rows += rows_of(rates, task=shown.task, environments=num_envs, threads=count)
                key = f"{shown.task}, {num_envs} environments, {count} threads"
                figures["frames_per_second"][key] = {name: float(np.median(rate)) for name, rate in rates.items()}
            for sim in sims.values():
                sim.close()
    name = "world_throughput_gpu" if gpu else "world_throughput"
    print_result(name, rows, figures)
    if not arguments.quick:
        command = "python -m benchmarks.world_throughput" + (f" --device {arguments.device}" if gpu else "")
        write_result(name, rows, figures, command=command, notes=NOTES)


if __name__ == "__main__":
    main()
