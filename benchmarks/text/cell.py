"""One cell: an imitated policy, training by an arm for a number of tokens, and evaluation on held-out problems."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import fmean
from typing import Any

import torch

from benchmarks.common import outcomes
from benchmarks.text.mechanism import LOSS, Mechanism, ObservedRecipe
from benchmarks.text.recipes import BASELINE, RECIPES
from benchmarks.text.tasks import TASKS, imitated, imitated_folder
from robopolicy.atomic import write_text
from robopolicy.core.recipe import Recipe
from robopolicy.core.recipe_keys import DEFAULTS
from robopolicy.evaluation.harness import run_episodes
from robopolicy.recipe_files import read_recipe
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.text.evaluation import sample_rollouts
from robopolicy.text.policy import TextPolicy
from robopolicy.text.recipe_trainer import TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import TextTask
from robopolicy.training.text_file_source import recipe_source
from robopolicy.training.text_rollout_source import TextRolloutSource

HELD_OUT = 500_000  # first seed of held-out problems
SEARCHED = 600_000  # first seed of the held-out problems on which learning rates are chosen
PROBLEMS, SAMPLES = 200, 8  # of the evaluation
CURVE, CURVE_PROBLEMS, CURVE_SAMPLES = 5, 100, 2  # points of a curve after the start, and their size
POOL = 6_000  # training problems
ROWS = 256  # rollouts per update, for every group size
STEPS = 4  # gradient steps per update; with one, all ratios are 1 and their bounds have no effect
NO_RATIO = "policy_gradient"  # surrogate without a ratio, valid for one step
FIRST_SEED = 1_000_000  # of training problems, times the seed
MEASURED = ("rollout/degenerate", "actor/nonzero_advantage_fraction", "actor/clip_fraction", "actor/approx_kl")


def run_cell(recipe: str, task: str, seed: int, *, tokens: int, lr: float, first: int = HELD_OUT) -> dict[str, Any]:
    """Run one recipe on one task from the imitated policy of the seed, with a learning rate that decays to a tenth.

    `first` is the seed of the first held-out problem of the evaluation; see `problems`.
    """
    torch.manual_seed(seed)
    bench = TASKS[task]
    policy = imitated(task, seed)
    base = examine_base(policy, task, seed, first)
    plain = DEFAULTS | read_recipe(recipe)
    size, epochs = int(plain["group_size"]), int(plain["epochs"])
    single = (plain["estimator"] or {}).get("surrogate") == NO_RATIO
    settings = TextRecipeConfig(
        recipe=recipe,
        lr=lr,
        lr_final=lr / 10,
        prompts_per_update=max(1, ROWS // size),
        minibatches=1 if single else max(1, STEPS // epochs),
        num_prompts=POOL,
    )
    updates = math.ceil(tokens / (ROWS * base["length"]))  # over which the learning rate decays, corrected below
    algorithm = ObservedRecipe(settings, policy, total_updates=updates)
    row = RECIPES.get(recipe)
    against = BASELINE if row is None else row.against
    mechanism = Mechanism(LOSS if row is None else row.mechanism, against)
    algorithm.watch(mechanism, Recipe.from_dict(read_recipe(against)))
    cell: dict[str, Any] = {
        "recipe": recipe,
        "task": task,
        "seed": seed,
        "budget": tokens,
        "lr": lr,
        "samples": SAMPLES,
        "base": base,
    }
    sim = make_sim(bench.task, SimOptions(num_envs=1))
    assert isinstance(sim, TextSim)
    start, seen = time.process_time(), list[dict[str, float]]()
    curve = [[0, fmean(base["wins"][:CURVE_PROBLEMS]) / SAMPLES]]
    with closing(recipe_source(sim, algorithm, seed=FIRST_SEED * (1 + seed))) as source:
        assert isinstance(source, TextRolloutSource)
        check_disjoint(source, sim, first)
        while source.generated < tokens:
            metrics = algorithm.update(source.next(algorithm)) | source.metrics()
            algorithm.total_updates = max(algorithm.updates + 1, round(algorithm.updates * tokens / source.generated))
            seen.append({name: float(value) for name, value in metrics.items()})
            mechanism.observe_metrics(seen[-1])
            if source.generated >= len(curve) * tokens / CURVE:
                curve.append([source.generated, quick_accuracy(policy, sim, first)])
        trained = {
            "tokens": source.generated,
            "updates": algorithm.updates,
            "curve": curve,
            "training": _means(seen, MEASURED),
            "mechanism": mechanism.to_dict(),
            "seconds": round(time.process_time() - start, 1),
        }
    return cell | trained | {"after": examine(policy, task, first)}


def problems(task: TextTask, first: int) -> list[int]:
    """Seeds of held-out problems of different content, from `first`.

    The search for learning rates has no problem of the evaluation.
    """
    seen: set[str] = set()
    seeds: list[int] = []
    for start in dict.fromkeys((HELD_OUT, first)):
        seeds = []
        for seed in range(start, start + FIRST_SEED // 20):
            content = task.content(task.held_out_seed(seed))
            if content not in seen:
                seen.add(content)
                seeds.append(seed)
            if len(seeds) == PROBLEMS:
                break
        else:
            raise RuntimeError(f"{task.name} has fewer than {PROBLEMS} held-out problems from seed {start}.")
    return seeds


def check_disjoint(source: TextRolloutSource, sim: TextSim, first: int) -> None:
    """Check that no training problem is a problem of the evaluation, whose first seed is `first`."""
    task = sim.task
    training = {task.content(entry.payload) for entry in source.pool.tasks}
    held_out = {task.content(task.held_out_seed(seed)) for seed in problems(task, first)}
    if common := training & held_out:
        raise RuntimeError(f"{len(common)} problems of {task.name} are in training and evaluation.")


def examine_base(policy: TextPolicy, name: str, seed: int, first: int) -> dict[str, Any]:
    """`examine` of the imitated policy of a seed, stored with it."""
    file = imitated_folder(name, seed) / f"examined_{first}.json"
    if not file.exists():
        write_text(file, json.dumps(examine(policy, name, first)))
    return json.loads(file.read_text())


def examine(policy: TextPolicy, name: str, first: int) -> dict[str, Any]:
    """Outcomes of held-out problems from `first`: of the likeliest answers, and counts of successes of sampled ones."""
    policy.eval()
    with closing(make_sim(TASKS[name].task, SimOptions(num_envs=PROBLEMS))) as sim:
        assert isinstance(sim, TextSim)
        seeds = problems(sim.task, first)
        greedy = run_episodes(policy, sim, seeds)
        sampled = sample_rollouts(policy, sim.task, seeds, samples=SAMPLES)
    numbers = {name: value for name, value in sampled.to_dict().items() if isinstance(value, float)}
    return {"greedy": outcomes(greedy), "wins": sampled.success.sum(1).tolist(), **numbers}


def quick_accuracy(policy: TextPolicy, sim: TextSim, first: int) -> float:
    """Mean success of sampled answers to some held-out problems."""
    policy.eval()
    seeds = problems(sim.task, first)[:CURVE_PROBLEMS]
    return float(sample_rollouts(policy, sim.task, seeds, samples=CURVE_SAMPLES).success.double().mean())


def _means(rows: Sequence[dict[str, float]], names: Sequence[str]) -> dict[str, float]:
    """Means over the updates that report a metric, without the first part of the names."""
    found = {name: [row[name] for row in rows if name in row] for name in names}
    return {name.partition("/")[2]: fmean(values) for name, values in found.items() if values}
