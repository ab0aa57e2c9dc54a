"""One cell: demonstrations -> base policy -> fine-tuning -> evaluation of both on the same held-out seeds."""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.finetune.methods import FLOW, Base, Method
from benchmarks.finetune.tasks import BenchTask
from benchmarks.study import learning_curve, run_command, shared, train_once, train_to_end
from robopolicy.atomic import write_text
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.result import EvalResult
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.training.checkpoint import MODEL, load_policy
from robopolicy.training.manifest import read_manifest

WORK = Path("runs/finetune")
EPISODES = 200
HELD_OUT = 50_000  # first held-out seed; training evaluates from seed 10000 and collects from seed 1000000
GOAL = 0.9  # success whose first crossing is reported


def run_base(base: Base, task: BenchTask, seed: int) -> dict[str, Any]:
    """A cell of the null arm: only the cloned base."""
    checkpoint = base_policy(base, task, seed)
    return {"method": base.name, "task": task.name, "seed": seed, "base": judge(checkpoint, task.task)}


def run_cell(method: Method, task: BenchTask, seed: int, folder: Path, *, steps: int | None = None) -> dict[str, Any]:
    """All table data of one method on one task with one seed; the run is in `folder`, its inputs are shared."""
    settings = [*method.preset, f"task={task.task}", "evaluation.max_fraction=0", *method.settings]
    if method.base is None:
        base = None
        settings += task.chunk
    else:
        base = base_policy(method.base, task, seed)
        settings.append(f"init_from={base}")
    if method.demonstrations:
        kind = method.base.kind if method.base else FLOW.kind
        settings.append(f"dataset={demonstrations(task, seed, kind)}")
    before = judge(base, task.task)
    settings += _pace(method, task, steps, before)
    settings.append(f"evaluation.episodes={task.evaluated}")
    run = folder / "run"
    last = train_to_end(run, *settings, f"seed={seed}")
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    return {
        "method": method.name,
        "task": task.name,
        "seed": seed,
        "base": before,
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


def demonstrations(task: BenchTask, seed: int, kind: str = FLOW.kind) -> Path:
    """The dataset of a task and seed for a kind of head, collected once."""
    episodes = task.demonstrations[kind]
    folder = WORK / "data" / f"{task.name}-{episodes}-{seed}"
    with shared(folder):
        if not folder.exists():
            size = ["--episodes", str(episodes), "--seed", str(100_000 + 1_000 * seed)]
            policy = (
                ["--policy", str(_half_trained(task, seed)), "--keep-failures", "--stochastic"]
                if task.source_steps
                else []
            )
            run_command("collect", task.task, *size, *policy, "--out", str(folder))
    return folder


def base_policy(base: Base, task: BenchTask, seed: int) -> Path:
    """The cloned base, trained once for all methods that start from it."""
    data = demonstrations(task, seed, base.kind)
    return train_once(
        WORK / "base" / f"{base.name}-{task.name}-{seed}",
        *(f"task={task.task}", "algorithm=bc", f"dataset={data}", *base.settings, *task.chunk),
        *(f"budget.updates={base.updates}", "evaluation.episodes=0", f"seed={seed}"),
    )


def judge(checkpoint: Path | None, task: str) -> dict[str, Any] | None:
    """Summary on the held-out seeds."""
    return None if checkpoint is None else held_out(checkpoint, task).summary()


def held_out(checkpoint: Path, task: str) -> EvalResult:
    """Evaluation on the held-out seeds, run once per policy: the best checkpoint is often the base or the last."""
    kept = WORK / "held_out" / f"{task.replace('/', '_')}-{_fingerprint(checkpoint)}.json"
    if not kept.exists():
        policy, _ = load_policy(checkpoint)
        options = SimOptions(num_envs=32, **observation_options([policy.spec.observation]))
        with closing(make_sim(task, options)) as sim:
            result = evaluate(policy, sim, episodes=EPISODES, seed=HELD_OUT)
        write_text(kept, json.dumps(result.to_dict()))
    return EvalResult.from_dict(json.loads(kept.read_text(encoding="utf-8")))


def _fingerprint(checkpoint: Path) -> str:
    """A hash that is equal for checkpoints of the same policy."""
    manifest = read_manifest(checkpoint)
    what = [manifest.policy, manifest.config, manifest.spec, manifest.files[MODEL]]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _half_trained(task: BenchTask, seed: int) -> Path:
    return train_once(
        WORK / "source" / f"sac-{task.name}-{seed}",
        *(f"task={task.task}", "policy=squashed_gaussian", "algorithm=sac", *task.chunk, "sim.num_envs=8"),
        *(
            f"budget.env_steps={task.source_steps}",
            "evaluation.episodes=10",
            "evaluation.max_fraction=0",
            f"seed={seed}",
        ),
    )


def _first_crossing(folder: Path) -> float | None:
    """Environment steps at the first evaluation that reached the goal; None if none did."""
    return next((steps for steps, score in learning_curve(folder, "success", "return_mean") if score >= GOAL), None)


def _pace(method: Method, task: BenchTask, steps: int | None, before: dict[str, Any] | None) -> list[str]:
    """Settings of the budget, by default the task's: environments and rollout length, or critic steps per decision.

    Group methods collect whole episodes: their budget is the number of updates that have as many steps at the episode
    length of the base.
    """
    if method.source == "replay":
        steps = steps or (task.published_steps if method.published else task.replay_steps)
        ratio = () if method.published else (f"algorithm.utd={task.horizon / task.steps_per_update}",)
        return ["budget.updates=0", f"budget.env_steps={steps}", *ratio]
    steps = steps or task.env_steps
    wide = f"sim.num_envs={task.num_envs}"
    if method.source == "group":
        assert before is not None
        return [wide, f"budget.updates={max(1, round(steps / (task.num_envs * before['length_mean'])))}"]
    decisions = task.rollout // task.horizon
    return [wide, f"algorithm.num_steps={decisions}", "budget.updates=0", f"budget.env_steps={steps}"]
