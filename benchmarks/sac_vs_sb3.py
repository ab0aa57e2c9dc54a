"""Gradient updates per second of SAC against Stable-Baselines3's SAC.

    python -m benchmarks.sac_vs_sb3 --quick      # few turns, nothing written
    python -m benchmarks.sac_vs_sb3              # on an idle machine: 2 minutes

Both get the same networks, batch, learning rates and discount, on one CPU thread; an update includes sampling its batch
from a buffer of the same random steps, with the dimensions of HalfCheetah. The learners alternate, so that a drift of
the machine's speed affects all. A ratio is our rate divided by Stable-Baselines3's, in float32 or with half-precision
matrix products, which help where the processor computes them natively. The table shows the rates of every measured
processor.

`benchmarks.control` and `benchmarks.control_million` compare returns.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.common import Cell, cells_named, machine, made_on, print_result, save_cell, write_result
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.critics.q import CriticConfig
from robopolicy.data.replay import Replay
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

OURS, HALF, THEIRS = "robopolicy", "robopolicy bfloat16", "stable-baselines3"
LEARNERS = (OURS, HALF, THEIRS)
NOTES = [
    "One thread. Ratios are medians of the ratios paired by turn; their brackets are 95 % bootstrap intervals over the "
    "turns of one run. `control` and `control_million` compare returns."
]
RATES = "sac_vs_sb3/rates-"  # cells, one per processor
OBSERVATION, ACTION = 17, 6  # dimensions of HalfCheetah, at which the rates are measured


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of both learners: Stable-Baselines3's defaults except for the smaller buffer."""

    capacity: int = 100_000
    batch_size: int = 256
    lr: float = 3e-4
    gamma: float = 0.99
    tau: float = 0.005
    hidden: tuple[int, ...] = (256, 256)


def make_ours(settings: Settings, precision: str) -> SAC:
    """Our learner with Stable-Baselines3's network."""
    shape = GaussianConfig(
        hidden=settings.hidden,
        activation="relu",
        orthogonal_init=False,
        state_dependent_std=True,
        log_std_min=-20.0,
        squash=True,
        normalization="identity",
        action_normalization="minmax",
    )
    policy = GaussianPolicy(shape, PolicySpec({"state": (OBSERVATION,)}, ACTION))
    policy.fit_normalizer({"action": {"min": [-1.0] * ACTION, "max": [1.0] * ACTION}})
    config = SACConfig(
        gamma=settings.gamma,
        batch_size=settings.batch_size,
        lr=settings.lr,
        critic_lr=settings.lr,
        temperature_lr=settings.lr,
        tau=settings.tau,
        critic=CriticConfig(hidden=settings.hidden, activation="relu", layer_norm=False),
        precision=precision,
    )
    return SAC(config, policy, total_updates=1)


def make_theirs(settings: Settings) -> Any:
    """Stable-Baselines3's learner."""
    import gymnasium
    from stable_baselines3 import SAC as SB3SAC

    return SB3SAC(
        "MlpPolicy",
        gymnasium.make("HalfCheetah-v5"),
        learning_rate=settings.lr,
        buffer_size=settings.capacity,
        batch_size=settings.batch_size,
        tau=settings.tau,
        gamma=settings.gamma,
        policy_kwargs={"net_arch": list(settings.hidden)},
        seed=0,
        device="cpu",
    )


def updaters(settings: Settings) -> dict[str, Callable[[int], None]]:
    """One function per learner that samples and trains on `n` batches, from a buffer of the same random steps."""
    from stable_baselines3.common.logger import Logger

    rng = np.random.default_rng(0)
    rows = 20_000
    obs = rng.normal(size=(rows + 1, OBSERVATION)).astype(np.float32)
    action = rng.uniform(-1, 1, (rows, ACTION)).astype(np.float32)
    reward = rng.normal(size=rows).astype(np.float32)
    memory, no = Replay(settings.capacity), torch.tensor([False])
    theirs = make_theirs(settings)
    theirs.set_logger(Logger(None, []))
    for t in range(rows):
        seen, next_seen = torch.from_numpy(obs[t : t + 1]), torch.from_numpy(obs[t + 1 : t + 2])
        played, earned = torch.from_numpy(action[t : t + 1]), torch.from_numpy(reward[t : t + 1])
        memory.add(torch.tensor([0]), {"state": seen}, played, earned, no, no, {"state": next_seen})
        theirs.replay_buffer.add(obs[t], obs[t + 1], action[t], reward[t], np.zeros(1), [{}])
    generator = torch.Generator().manual_seed(0)

    def ours(precision: str) -> Callable[[int], None]:
        learner = make_ours(settings, precision)

        def update(count: int) -> None:
            for _ in range(count):
                learner.update(memory.sample(learner.sample_spec, generator))

        return update

    return {
        OURS: ours("float32"),
        HALF: ours("bfloat16"),
        THEIRS: lambda count: theirs.train(count, settings.batch_size),
    }


def measure_rates(settings: Settings, repetitions: int, updates: int) -> dict[str, list[float]]:
    """Updates per second of every learner in every repetition."""
    rates: dict[str, list[float]] = {}
    learners = updaters(settings)
    for repetition in range(repetitions + 1):
        for name, update in learners.items():
            start = time.perf_counter()
            update(updates)
            if repetition:  # the first one warms up
                rates.setdefault(name, []).append(updates / (time.perf_counter() - start))
    return rates


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median of the paired ratios, and its 95 % bootstrap interval."""
    pairs = np.array(ours) / np.array(theirs)
    draws = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
    low, high = np.percentile(np.median(pairs[draws], 1), [2.5, 97.5])
    return {"value": float(np.median(pairs)), "low": float(low), "high": float(high)}


def main() -> None:
    """Measure the rates of this processor, then print and write the table of all measured processors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few turns, no results written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    settings, processor = Settings(), str(machine()["cpu"])
    rates = measure_rates(settings, 10, 30) if quick else measure_rates(settings, 40, 100)
    cell = {"processor": processor, "rates": rates, "made_on": made_on()}
    if not quick:
        save_cell(RATES + re.sub("[^a-z0-9]+", "-", processor.lower()).strip("-"), cell)
    cells = [cell] if quick else cells_named(RATES)
    rows, figures = summarise(cells, settings)
    print_result("sac_vs_sb3", rows, figures, cells=cells)
    if not quick:
        write_result("sac_vs_sb3", rows, figures, command="python -m benchmarks.sac_vs_sb3", notes=NOTES, cells=cells)


def summarise(cells: Sequence[Cell], settings: Settings) -> tuple[list[dict[str, object]], dict[str, Any]]:
    """One row per learner, and the figures: paired ratios of the rates per processor."""
    figures: dict[str, Any] = {"settings": asdict(settings)}
    rows: list[dict[str, object]] = [{"learner": name} for name in LEARNERS]
    for cell in cells:
        processor, found = cell["processor"], cell["rates"]
        figures[processor] = {}
        for row, name in zip(rows, LEARNERS, strict=True):
            rate, share = float(np.median(found[name])), ratio(found[name], found[THEIRS])
            figures[processor][name] = {"updates_per_second": rate, "ratio": share}
            interval = f" [{share['low']:.2f}, {share['high']:.2f}]" if name != THEIRS else ""
            row[f"updates/s, {processor}"] = f"{rate:.0f}, {share['value']:.2f}x{interval}"
    return rows, figures


if __name__ == "__main__":
    main()
