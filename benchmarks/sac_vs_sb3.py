"""SAC against Stable-Baselines3's SAC: gradient updates per second, and return after equal numbers of steps.

    python -m benchmarks.sac_vs_sb3 --quick      # the rates, and 3000 steps of the pendulum with one seed
    python -m benchmarks.sac_vs_sb3 --rates      # the rates alone, on an idle machine: 2 minutes
    python -m benchmarks.sac_vs_sb3              # InvertedPendulum-v5 and HalfCheetah-v5, 5 seeds each, 2 CPU hours

Both get the same networks, batch, learning rates, discount, warm-up and one gradient step per environment step, on one
CPU thread; an update includes sampling its batch. Repetitions of the rates alternate between the learners, so that a
drift of the machine's speed affects all; the runs measure returns. A ratio is our rate divided by Stable-Baselines3's,
in float32 or with half-precision matrix products, which help where the processor computes them natively. The table
shows the rates of every measured processor. The final policies of all runs are evaluated on the same 20 deterministic
episodes.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common import (
    Act,
    cells_named,
    finished_cells,
    load_cell,
    machine,
    mean_return,
    print_result,
    runs_iqm,
    save_cell,
    write_result,
)
from benchmarks.parallel import run_cells
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.critics.q import CriticConfig
from robopolicy.data.replay import Replay
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.rollout.off_policy import ReplaySampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

TASKS = {"InvertedPendulum-v5": "locomotion/inverted_pendulum", "HalfCheetah-v5": "locomotion/half_cheetah"}
OURS, HALF, THEIRS = "robopolicy", "robopolicy bfloat16", "stable-baselines3"
RATES = "sac_vs_sb3/rates-"  # cells, one per processor
OBSERVATION, ACTION = 17, 6  # dimensions of HalfCheetah, at which the rates are measured


@dataclass(frozen=True)
class Settings:
    """Hyper-parameters of both learners: Stable-Baselines3's defaults except for the warm-up."""

    steps: tuple[int, ...] = (10_000, 20_000)  # environment steps per run, one per task
    warmup: int = 1_000  # first steps, with random actions
    capacity: int = 100_000
    batch_size: int = 256
    lr: float = 3e-4
    gamma: float = 0.99
    tau: float = 0.005
    hidden: tuple[int, ...] = (256, 256)
    episodes: int = 20  # of the final evaluation


def make_ours(spec: PolicySpec, low: list[float], high: list[float], settings: Settings, precision: str) -> SAC:
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
    policy = GaussianPolicy(shape, spec)
    policy.fit_normalizer({"action": {"min": low, "max": high}})
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


def make_theirs(env: Any, settings: Settings, seed: int = 0) -> Any:
    """Stable-Baselines3's learner."""
    from stable_baselines3 import SAC as SB3SAC

    return SB3SAC(
        "MlpPolicy",
        env,
        learning_rate=settings.lr,
        buffer_size=settings.capacity,
        learning_starts=settings.warmup,
        batch_size=settings.batch_size,
        tau=settings.tau,
        gamma=settings.gamma,
        policy_kwargs={"net_arch": list(settings.hidden)},
        seed=seed,
        device="cpu",
    )


# Rates.


def updaters(settings: Settings) -> dict[str, Callable[[int], None]]:
    """One function per learner that samples and trains on `n` batches, from a buffer of the same random steps."""
    import gymnasium
    from stable_baselines3.common.logger import Logger

    rng = np.random.default_rng(0)
    rows = 20_000
    obs = rng.normal(size=(rows + 1, OBSERVATION)).astype(np.float32)
    action = rng.uniform(-1, 1, (rows, ACTION)).astype(np.float32)
    reward = rng.normal(size=rows).astype(np.float32)
    memory, no = Replay(settings.capacity), torch.tensor([False])
    theirs = make_theirs(gymnasium.make("HalfCheetah-v5"), settings)
    theirs.set_logger(Logger(None, []))
    for t in range(rows):
        seen, next_seen = torch.from_numpy(obs[t : t + 1]), torch.from_numpy(obs[t + 1 : t + 2])
        played, earned = torch.from_numpy(action[t : t + 1]), torch.from_numpy(reward[t : t + 1])
        memory.add(torch.tensor([0]), {"state": seen}, played, earned, no, no, {"state": next_seen})
        theirs.replay_buffer.add(obs[t], obs[t + 1], action[t], reward[t], np.zeros(1), [{}])
    generator, spec = torch.Generator().manual_seed(0), PolicySpec({"state": (OBSERVATION,)}, ACTION)

    def ours(precision: str) -> Callable[[int], None]:
        learner = make_ours(spec, [-1.0] * ACTION, [1.0] * ACTION, settings, precision)

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


def rates_by_processor(settings: Settings, *, again: bool) -> dict[str, dict[str, list[float]]]:
    """Rates of all measured processors; measures this one if it is missing or with `again`."""
    processor = str(machine()["cpu"])
    name = RATES + re.sub("[^a-z0-9]+", "-", processor.lower()).strip("-")
    if again or load_cell(name) is None:
        save_cell(name, {"processor": processor, "rates": measure_rates(settings, 40, 100)})
    return {cell["processor"]: cell["rates"] for cell in cells_named(RATES)}


def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median of the paired ratios, and its 95 % bootstrap interval."""
    pairs = np.array(ours) / np.array(theirs)
    draws = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
    low, high = np.percentile(np.median(pairs[draws], 1), [2.5, 97.5])
    return {"value": float(np.median(pairs)), "low": float(low), "high": float(high)}


# Runs.


def train_ours(env_id: str, seed: int, steps: int, settings: Settings, precision: str = "float32") -> tuple[Act, float]:
    """Train our SAC; returns the deterministic policy `(N, D) -> (N, A)` and the training seconds."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    sim = make_sim(TASKS[env_id], SimOptions(num_envs=1))
    spec = PolicySpec({"state": sim.spec.observation["state"].shape}, sim.spec.action_dim)
    low, high = sim.spec.action_low.tolist(), sim.spec.action_high.tolist()
    algorithm = make_ours(spec, low, high, settings, precision)
    generator = torch.Generator().manual_seed(seed)
    sampler = ReplaySampler(ChunkedSim(sim), Replay(settings.capacity), seed=seed * 1_000_000)
    sampler.collect(algorithm.warmup_action, settings.warmup)
    for _ in range(steps - settings.warmup):
        sampler.collect(algorithm.act)
        algorithm.update(sampler.replay.sample(algorithm.sample_spec, generator))
    seconds = time.perf_counter() - start
    sim.close()
    return lambda obs: algorithm.policy.act({"state": obs["state"][:, None]}, deterministic=True)[:, 0], seconds


def train_theirs(env_id: str, seed: int, steps: int, settings: Settings) -> tuple[Act, float]:
    """Train Stable-Baselines3's SAC; returns policy and training seconds."""
    import gymnasium

    start = time.perf_counter()
    model = make_theirs(gymnasium.make(env_id), settings, seed)
    model.learn(steps)
    seconds = time.perf_counter() - start
    return lambda obs: torch.as_tensor(model.predict(obs["state"].numpy(), deterministic=True)[0]), seconds


Key = tuple[str, str, int]  # learner, task, seed
LEARNERS: dict[str, Callable[..., tuple[Act, float]]] = {
    OURS: train_ours,
    HALF: lambda *args: train_ours(*args, precision="bfloat16"),
    THEIRS: train_theirs,
}


def run_cell(key: Key, steps: int) -> dict[str, Any]:
    """One learner on one task with one seed."""
    torch.set_num_threads(1)
    learner, env_id, seed = key
    settings = Settings()
    act, seconds = LEARNERS[learner](env_id, seed, steps, settings)
    with closing(make_sim(TASKS[env_id], SimOptions(settings.episodes))) as sim:
        score = mean_return(act, sim)
    return {"learner": learner, "task": env_id, "seed": seed, "return": score, "seconds": seconds}


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    learner, env_id, seed = key
    return f"sac_vs_sb3/{learner.replace(' ', '-')}-{env_id}-{seed}"


def main() -> None:
    """Measure the rates, run every missing cell, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="rates and one short run each, no results written")
    parser.add_argument(
        "--rates", action="store_true", help="measure the rates again, and print the tables without running cells"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs, one thread each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = replace(Settings(), steps=(3_000,)) if arguments.quick else Settings()
    if arguments.quick:
        rates = {str(machine()["cpu"]): measure_rates(settings, 10, 30)}
    else:
        rates = rates_by_processor(settings, again=arguments.rates)
    cells: list[dict[str, Any]] = []
    seeds = range(1 if arguments.quick else arguments.seeds)
    for env_id, steps in zip(TASKS, settings.steps, strict=False):
        keys = [(learner, env_id, seed) for seed in seeds for learner in LEARNERS]
        if arguments.rates:
            cells += finished_cells(map(cell_name, keys))
            continue
        run = partial(run_cell, steps=steps)
        found = {"name": cell_name, "progress": _progress, "jobs": arguments.jobs, "keep": not arguments.quick}
        cells += run_cells(keys, run, **found)
    rows, figures = summarise(rates, cells, settings)
    print_result("sac_vs_sb3", rows, figures)
    if not arguments.quick:
        steps_of, found = dict(zip(TASKS, settings.steps, strict=True)), {cell["task"]: None for cell in cells}
        budgets = ", ".join(f"{steps_of[task]:,} steps of {task}" for task in found)
        notes = [f"Returns after {budgets}. Ratios are paired by turn, with 95 % intervals."]
        write_result("sac_vs_sb3", rows, figures, command="python -m benchmarks.sac_vs_sb3", notes=notes)


def _progress(cell: dict[str, Any]) -> str:
    return f"return {cell['return']:.0f}, {cell['seconds']:.1f} s"


def summarise(
    rates: dict[str, dict[str, list[float]]], cells: list[dict[str, Any]], settings: Settings
) -> tuple[list[dict[str, object]], dict[str, Any]]:
    """One row per learner, and the figures: paired ratios of the rates per processor, IQM of the returns per task."""
    figures: dict[str, Any] = {"settings": asdict(settings)}
    rows: list[dict[str, object]] = [{"learner": name} for name in LEARNERS]
    for processor, found in rates.items():
        figures[processor] = {}
        for row, name in zip(rows, LEARNERS, strict=True):
            rate, share = float(np.median(found[name])), ratio(found[name], found[THEIRS])
            figures[processor][name] = {"updates_per_second": rate, "ratio": share}
            interval = f" [{share['low']:.2f}, {share['high']:.2f}]" if name != THEIRS else ""
            row[f"updates/s, {processor}"] = f"{rate:.0f}, {share['value']:.2f}x{interval}"
    for task in dict.fromkeys(cell["task"] for cell in cells):
        figures[task] = {}
        for row, name in zip(rows, LEARNERS, strict=True):
            runs = [cell["return"] for cell in cells if (cell["task"], cell["learner"]) == (task, name)]
            row[column := f"return, IQM [95 %], {task}"] = "-"
            if not runs:
                continue
            score = runs_iqm(runs)
            figures[task][name] = {"iqm": score.estimate, "low": score.low, "high": score.high, "seeds": len(runs)}
            row[column] = f"{score:.0f} ({len(runs)} seeds)"
    return rows, figures


if __name__ == "__main__":
    from benchmarks.sac_vs_sb3 import main as importable  # the cells' processes cannot import `__main__`

    importable()
