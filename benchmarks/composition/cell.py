"""One cell: demonstrations -> two parents -> searched weights -> everybody on the same held-out seeds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.composition.tasks import ComposeTask, Parent
from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.statistics import dataset_statistics
from robopolicy.evaluation.actors import evaluation_mode
from robopolicy.evaluation.result import EvalResult
from robopolicy.evaluation.search import SimEvaluator, WeightSearch, hold_out, make_search, search_weights
from robopolicy.policies import POLICIES, make_policy
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.noise import RowStreams
from robopolicy.policies.wrappers.composed import compose
from robopolicy.schema import from_plain
from robopolicy.sim.contract import SimSpec
from robopolicy.sim.registry import get_task, make_sim

SEARCHED = ("convex", "or")  # operators whose weights are searched; those of AND follow from the densities
OPERATORS = (*SEARCHED, "and")
DEMONSTRATIONS, SEARCH, HELD_OUT = 100_000, 20_000, 50_000  # first episode seeds; a cell moves them by 1000 seed
ENVS = 32


@dataclass(frozen=True)
class Settings:
    """Budget of a cell."""

    search_episodes: int = 50  # per weight
    divisions: int = 10  # weights are multiples of 1 / divisions
    episodes: int = 200  # held out
    training: float = 1.0  # share of every parent's updates
    rounds: int = 20  # of the timing


class EpisodeList(list[Episode]):
    """Where `collect` puts what it records."""

    def add(self, episode: Episode) -> None:
        """Keep one more."""
        self.append(episode)


def run_cell(task: ComposeTask, seed: int, settings: Settings) -> dict[str, Any]:
    """Everything the table needs of one task with one seed."""
    start = time.process_time()
    data, expert = demonstrations(task, seed)
    names = [parent.label for parent in task.parents]
    with closing(make_sim(task.task, task.options(ENVS))) as sim:
        parents = [train(task, side, data, sim.spec, seed, settings) for side in (0, 1)]
        trained = time.process_time()
        play, shift = SimEvaluator(sim), 1000 * seed
        searches: dict[str, WeightSearch] = {}
        policies: dict[str, Policy] = dict(zip(names, parents, strict=True))
        for operator in OPERATORS:
            if operator in SEARCHED:
                method = make_search("grid", episodes=settings.search_episodes, divisions=settings.divisions)

                def make(weights: Sequence[float], operator: str = operator) -> Policy:
                    return compose(parents, operator=operator, weights=weights)

                searches[operator] = search_weights(method, names, make, play, seed=SEARCH + shift)
                policies[operator] = make(searches[operator].weights)
            else:
                policies[operator] = compose(parents, operator=operator)
        seeds = range(HELD_OUT + shift, HELD_OUT + shift + settings.episodes)
        results = hold_out(policies, play, seeds)
        obs = {key: value.unsqueeze(1) for key, value in sim.reset(SEARCH).items()}
    return {
        "task": task.name,
        "seed": seed,
        "parents": names,
        "demonstrations": task.demonstrations,
        "expert_success": expert,
        "weights": {name: list(search.weights) for name, search in searches.items()},
        "curves": {name: _curve(search) for name, search in searches.items()},
        "held_out": {name: _outcomes(result) for name, result in results.items()},
        "latency": latency(policies, names, obs, settings.rounds),
        "training_seconds": round(trained - start, 1),
        "seconds": round(time.process_time() - start, 1),
    }


def demonstrations(task: ComposeTask, seed: int) -> tuple[Episodes, float]:
    """Successful episodes of the scripted expert for both parents, and the share of its attempts they are."""
    found = EpisodeList()
    with closing(make_sim(task.task, task.options(16))) as sim:
        expert = get_task(task.task).need_expert()()
        report = collect(sim, expert, found, episodes=2 * task.demonstrations, seed=DEMONSTRATIONS + 1000 * seed)
        return Episodes.from_list(found, sim.spec.control_dt), report.kept / report.attempts


def train(task: ComposeTask, side: int, data: Episodes, sim: SimSpec, seed: int, settings: Settings) -> Policy:
    """Clone one parent from its half of the demonstrations."""
    parent = task.parents[side]
    half = seen_by(parent, data.subset(range(side * task.demonstrations, (side + 1) * task.demonstrations)))
    torch.manual_seed(1000 * seed + side)
    shapes = {key: tuple(half.arrays[key].shape[1:]) for key in parent.keys}
    spec = PolicySpec(shapes, sim.action_dim, task.horizon, task.horizon)
    config = from_plain(POLICIES[parent.head][0], dict(parent.settings), f"policy '{parent.head}'")
    policy = make_policy(parent.head, config, spec)
    bounds = {"action": {"min": sim.action_low.numpy(), "max": sim.action_high.numpy()}}  # the same for both parents
    policy.fit_normalizer({**dataset_statistics(half), **bounds})
    updates = max(1, round(settings.training * parent.updates))
    algorithm = BC(BCConfig(batch_size=parent.batch_size), policy, total_updates=updates)
    batches = ChunkSampler(half, horizon=task.horizon, batch_size=parent.batch_size, seed=seed)
    for _, batch in zip(range(updates), batches, strict=False):
        algorithm.update(batch)
    return algorithm.deployable().eval()


def seen_by(parent: Parent, data: Episodes) -> Episodes:
    """The episodes without what the parent does not see."""
    arrays = {key: data.arrays[key] for key in (*parent.keys, "action")}
    return Episodes(arrays, data.ends, data.tasks, data.seeds, data.control_dt)


def latency(
    policies: dict[str, Policy], parents: Sequence[str], obs: dict[str, torch.Tensor], rounds: int
) -> dict[str, Any]:
    """Time of one batched decision of everybody, taken in turns [ms], and of the compositions relative to the parents.

    Each ratio is the median over rounds of the composition's time divided by the sum of its parents' in that round.
    """
    times: dict[str, list[float]] = {name: [] for name in policies}
    for turn in range(-2, rounds):  # two to warm up
        for name, policy in policies.items():
            seen = {key: obs[key] for key in policy.spec.observation}
            rows = len(next(iter(seen.values())))
            with torch.inference_mode(), evaluation_mode(policy):
                begin = time.perf_counter()
                policy.act(seen, deterministic=True, generator=RowStreams(range(rows), [0] * rows))
                spent = time.perf_counter() - begin
            if turn >= 0:
                times[name].append(1e3 * spent)
    total = np.sum([times[name] for name in parents], axis=0)
    ratios = {name: float(np.median(times[name] / total)) for name in policies if name not in parents}
    return {"ms": {name: round(median(spent), 3) for name, spent in times.items()}, "ratio": ratios, "batch": rows}


def _curve(search: WeightSearch) -> list[dict[str, Any]]:
    """Outcome of every weight of the first parent, on the episodes of the search."""
    return [{"weight": candidate.weights[0], **_outcomes(candidate.result)} for candidate in search.candidates]


def _outcomes(result: EvalResult) -> dict[str, Any]:
    """What pooling and pairing need: one entry per episode."""
    assert result.success is not None
    return {"success": result.success.astype(int).tolist(), "return": np.round(result.returns, 4).tolist()}
