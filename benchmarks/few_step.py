"""Success over network calls: generative heads with few and with many sampler steps, imitating the same expert.

    python -m benchmarks.few_step --quick                       # one seed, little training, nothing written
    python -m benchmarks.few_step                               # 3 seeds, about 12 minutes each on one core
    python -m benchmarks.few_step --learners flow meanflow --seeds 0 1 2 3 4

Task lift, 10 demonstrations of the scripted expert, 4000 updates of every learner (students train for as many updates
as their teacher), then 200 held-out episodes per sampler with the last, averaged weights. A cell is one learner with
one seed; finished cells are skipped. Rows pool the episodes of all seeds (Wilson, 95 %); `by seed` shows the spread
over seeds, which the interval does not include. Latency is the time of one decision for one robot on this machine,
divided by its number of executed actions.

The expert is deterministic, so its data have nearly one mode: this table shows the cost and savings of few steps, not
how well heads separate modes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

import torch

from benchmarks.common import load_cell, print_result, save_cell, write_result
from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.algorithms.distill import Distill, DistillConfig
from robopolicy.algorithms.reflow import Reflow, ReflowConfig
from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.statistics import dataset_statistics
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.intervals import wilson
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES, make_policy
from robopolicy.sim.registry import SimOptions, get_task, make_sim

TASK, TASK_NAME = "manipulation/lift", "lift"
HELD_OUT = 50_000  # first held-out seed; training uses none of them
Sampler = Mapping[str, Any]  # settings of the policy's configuration


@dataclass(frozen=True)
class Settings:
    """Budget, the same for all learners."""

    demonstrations: int = 10
    updates: int = 4000
    batch_size: int = 256
    lr: float = 1e-3
    horizon: int = 4
    action_horizon: int = 4
    episodes: int = 200


@dataclass(frozen=True)
class Learner:
    """A training method, and the samplers of its evaluation."""

    samplers: Mapping[str, Sampler]  # label -> settings
    policy: str = ""  # head that is cloned; or
    teacher: str = ""  # learner that is distilled or straightened
    algorithm: str = "bc"
    settings: Mapping[str, Any] = field(default_factory=dict)


def steps(*counts: int) -> dict[str, Sampler]:
    """Samplers that differ in their number of steps."""
    return {f"K={count}": {"steps": count} for count in counts}


LEARNERS: dict[str, Learner] = {
    "flow": Learner(steps(1, 2, 4, 10, 100), policy="flow"),
    "reflow": Learner(steps(1, 2, 4), teacher="flow", algorithm="reflow"),
    "shortcut": Learner(steps(1, 2, 4), policy="shortcut"),
    "meanflow": Learner(steps(1, 2), policy="meanflow"),
    "consistency": Learner(steps(1, 2), policy="consistency"),
    "distilled": Learner(steps(1, 2), teacher="flow", algorithm="distill"),
    "diffusion": Learner(
        {
            "DDIM K=10": {"sampler": "ddim", "steps": 10},
            "DDIM K=100": {"sampler": "ddim", "steps": 100},
            "DDPM K=100": {"sampler": "ddpm", "steps": 100},
        },
        policy="diffusion",
    ),
}


class EpisodeList(list[Episode]):
    """A list that stores the episodes of `collect`."""

    def add(self, episode: Episode) -> None:
        """Append an episode."""
        self.append(episode)


@cache
def demonstrations(seed: int, count: int) -> Episodes:
    """Episodes of the scripted expert; every seed has its own."""
    make_expert = get_task(TASK).make_expert
    assert make_expert is not None
    found = EpisodeList()
    with closing(make_sim(TASK, SimOptions(num_envs=min(count, 16)))) as sim:
        collect(sim, make_expert(), found, episodes=count, seed=100_000 + 1_000 * seed)
        return Episodes.from_list(found, sim.spec.control_dt)


@cache
def train(name: str, seed: int, settings: Settings) -> tuple[Policy, float]:
    """The trained policy of a learner and its training seconds, including its teacher's."""
    learner, data = LEARNERS[name], demonstrations(seed, settings.demonstrations)
    torch.manual_seed(seed)
    common = {"lr": settings.lr, "batch_size": settings.batch_size}
    if learner.teacher:
        teacher, spent = train(learner.teacher, seed, settings)
        start = time.perf_counter()
        if learner.algorithm == "distill":
            algorithm: BC = Distill(DistillConfig(**common, seed=seed), teacher, total_updates=settings.updates)
        else:
            student = with_sampler(teacher, {}).requires_grad_(True)
            algorithm = Reflow(ReflowConfig(**common, seed=seed), student, total_updates=settings.updates)
    else:
        spent, start = 0.0, time.perf_counter()
        shapes = {key: tuple(data.arrays[key].shape[1:]) for key in data.observation_keys}
        spec = PolicySpec(shapes, data.arrays["action"].shape[1], settings.horizon, settings.action_horizon)
        policy = make_policy(learner.policy, POLICIES[learner.policy].config_class(**learner.settings), spec)
        policy.fit_normalizer(dataset_statistics(data))
        algorithm = BC(BCConfig(**common), policy, total_updates=settings.updates)
    batches = ChunkSampler(data, horizon=settings.horizon, batch_size=settings.batch_size, seed=seed)
    for _, batch in zip(range(settings.updates), batches, strict=False):
        algorithm.update(batch)
    return algorithm.inference_policy(), spent + time.perf_counter() - start


def with_sampler(policy: Policy, sampler: Sampler) -> Policy:
    """The same weights with other sampler settings."""
    other = type(policy)(replace(policy.config, **sampler), policy.spec)  # type: ignore[call-arg,attr-defined]
    other.load_state_dict(policy.state_dict())
    return other.eval()


def run_cell(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Train one learner and evaluate it with all of its samplers."""
    policy, seconds = train(name, seed, settings)
    results: dict[str, dict[str, Any]] = {}
    with closing(make_sim(TASK, SimOptions(num_envs=32))) as sim:
        for label, sampler in LEARNERS[name].samplers.items():
            judged = with_sampler(policy, sampler)
            summary = evaluate(judged, sim, episodes=settings.episodes, seed=HELD_OUT).summary()
            kept = ("success", "low", "high", "n", "network_calls_per_action", "latency_ms", "ms_per_action")
            results[label] = {"network_calls": judged.nfe, **{key: summary[key] for key in kept}}
    return {
        "learner": name,
        "task": TASK_NAME,
        "seed": seed,
        "train_seconds": round(seconds, 1),
        "settings": asdict(settings),
        "samplers": results,
    }


def summarise(cells: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, object]], dict[str, Any]]:
    """Table rows and figures, one per learner and sampler."""
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {"task": TASK_NAME, "seeds": sorted({cell["seed"] for cell in cells}), "results": {}}
    for name in [name for name in LEARNERS if any(cell["learner"] == name for cell in cells)]:
        mine = [cell for cell in cells if cell["learner"] == name]
        for label in mine[0]["samplers"]:
            runs = [cell["samplers"][label] for cell in mine]
            count = sum(run["n"] for run in runs)
            rate = wilson(round(sum(run["success"] * run["n"] for run in runs)), count)
            latency = sorted(run["ms_per_action"] for run in runs)[len(runs) // 2]
            seconds = sorted(cell["train_seconds"] for cell in mine)[len(mine) // 2]
            by_seed = " ".join(f"{run['success']:.0%}" for run in runs)
            rows.append(
                {
                    "head": name,
                    "sampler": label,
                    "calls per chunk": runs[0]["network_calls"],
                    "success [95 %]": f"{rate.estimate:.1%} [{rate.low:.1%}, {rate.high:.1%}]",
                    "by seed": by_seed,
                    "ms per action": round(latency, 3),
                    "training s": seconds,
                }
            )
            figures["results"][f"{name} {label}"] = {
                "success": rate.estimate,
                "low": rate.low,
                "high": rate.high,
                "n": count,
                "network_calls": runs[0]["network_calls"],
                "network_calls_per_action": runs[0]["network_calls_per_action"],
                "ms_per_action": latency,
                "train_seconds": seconds,
            }
    return rows, figures


def main() -> None:
    """Run every missing cell, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 600 updates, 40 episodes, no results written")
    parser.add_argument("--learners", nargs="+", choices=list(LEARNERS), default=list(LEARNERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(updates=600, episodes=40) if arguments.quick else Settings()
    cells: list[dict[str, Any]] = []
    for seed in [0] if arguments.quick else arguments.seeds:
        for name in arguments.learners:
            place = f"few_step/{name}-{TASK_NAME}-{seed}"
            cell = None if arguments.quick else load_cell(place)
            if cell is None:
                cell = run_cell(name, seed, settings)
                if not arguments.quick:
                    save_cell(place, cell)
            rates = ", ".join(f"{label} {run['success']:.0%}" for label, run in cell["samplers"].items())
            print(f"{name} seed {seed}: {rates}; trained in {cell['train_seconds']:.0f} s", flush=True)
            cells.append(cell)
        train.cache_clear()
    rows, figures = summarise(cells)
    figures["settings"] = asdict(settings)
    print_result("few_step", rows, figures)
    if not arguments.quick:
        write_result("few_step", rows, figures, command="python -m benchmarks.few_step")


if __name__ == "__main__":
    main()
