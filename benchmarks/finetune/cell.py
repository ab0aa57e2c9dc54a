"""One cell: demonstrations -> base policy -> fine-tuning -> evaluation of both on the same held-out seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.finetune.bases import base_policy, demonstration_count, demonstrations, judge
from benchmarks.finetune.methods import FLOW, Base, Method
from benchmarks.finetune.tasks import BenchTask
from benchmarks.study import learning_curve, read_report, train_to_end

GOAL = 0.9  # success whose first crossing is reported


def run_base(base: Base, task: BenchTask, seed: int) -> dict[str, Any]:
    """A cell of the null arm: only the cloned base."""
    checkpoint = base_policy(base, task, seed)
    common = {"method": base.name, "task": task.name, "seed": seed}
    episodes = demonstration_count(task, seed, base.kind)
    return {**common, "demonstrations": episodes, "base": judge(checkpoint, task.task)}


def facts(method: Method, task: BenchTask, seed: int, *, steps: int | None = None) -> dict[str, Any]:
    """Settings of one method on one task with one seed, and the result of its base; shared inputs are made once."""
    before = judge(base_policy(method.base, task, seed) if method.base else None, task.task)
    return {
        "method": method.name,
        "task": task.name,
        "seed": seed,
        "preset": method.preset(),
        "settings": plan(method, task, steps, before),
        "demonstrations": demonstration_count(task, seed, _kind(method)),
        "base": before,
    }


def run_cell(method: Method, task: BenchTask, seed: int, folder: Path, *, steps: int | None = None) -> dict[str, Any]:
    """Results of one method on one task with one seed; the run is in `folder`.

    Raises:
        TrainingDiverged: A value is not finite.
    """
    base = base_policy(method.base, task, seed) if method.base else None
    settings = plan(method, task, steps, judge(base, task.task))
    inputs = [f"init_from={base}"] if base else []
    inputs += [f"dataset={demonstrations(task, seed, _kind(method))}"] if method.demonstrations else []
    run = folder / "run"
    last = train_to_end(run, *settings, *inputs, f"seed={seed}")
    report = read_report(run)
    return {
        "finetuned": judge(run / "checkpoints" / "best", task.task),
        "last": judge(last, task.task),
        "env_steps": report["env_steps"],
        "steps_to_goal": _first_crossing(run),
        "curve": learning_curve(run, "success", "return_mean"),
        "seconds": round(report["seconds"], 1),
        "seconds_updating": round(report["seconds_updating"], 1),
        "restored": report["num_restores"],
        "kept_base": report["reverted_to_base"],
    }


def plan(method: Method, task: BenchTask, steps: int | None, before: dict[str, Any] | None) -> list[str]:
    """Settings of a run on top of its preset, without its inputs and seed; `before` judges the base."""
    return [
        *(*method.choices, f"task={task.task}", "evaluation.max_fraction=0", *method.settings),
        *(() if method.base else task.chunk),
        *_pace(method, task, steps, before),
        f"evaluation.episodes={task.evaluated}",
    ]


def _kind(method: Method) -> str:
    """Kind of head whose number of demonstrations the method has."""
    return method.base.kind if method.base else FLOW.kind


def _first_crossing(folder: Path) -> float | None:
    """Environment steps at the first evaluation that reached the goal; None if none did."""
    return next((steps for steps, score in learning_curve(folder, "success", "return_mean") if score >= GOAL), None)


def _pace(method: Method, task: BenchTask, steps: int | None, before: dict[str, Any] | None) -> list[str]:
    """Settings of the budget, by default the task's: environments and rollout length, or critic steps per decision.

    Group methods collect whole episodes: their budget is the number of updates that have as many steps at the episode
    length of the base.
    """
    if method.source == "replay":
        fewest = task.published_steps if method.published else task.replay_steps
        steps = steps or fewest * method.budget_multiple(task.name)
        ratio = () if method.published else (f"algorithm.utd={task.horizon / task.steps_per_update}",)
        return ["budget.updates=0", f"budget.env_steps={steps}", *ratio]
    steps = steps or task.env_steps * method.budget_multiple(task.name)
    wide = f"sim.num_envs={task.num_envs}"
    if method.source == "group":
        assert before is not None
        return [wide, f"budget.updates={max(1, round(steps / (task.num_envs * before['length_mean'])))}"]
    decisions = task.rollout // task.horizon
    return [wide, f"algorithm.num_steps={decisions}", "budget.updates=0", f"budget.env_steps={steps}"]
