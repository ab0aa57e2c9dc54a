"""One cell: demonstrations -> base policy -> fine-tuning -> both judged on the same held-out seeds."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.finetune.methods import Method
from benchmarks.finetune.tasks import BenchTask
from robopolicy.cli.main import main as robopolicy
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.compose import compose_config
from robopolicy.training.loop import start_run

WORK = Path("runs/finetune")
EPISODES = 200
HELD_OUT = 50_000  # first held-out seed; training evaluates on 10000 and onwards and plays from a million
GOAL = 0.9  # success whose first crossing is reported


class Failed(RuntimeError):
    """A step of a cell did not work."""


def run_cell(method: Method, task: BenchTask, seed: int, *, steps: int | None = None) -> dict[str, Any]:
    """Everything the table needs of one method on one task with one seed; intermediate results are kept and shared."""
    data = demonstrations(task, seed)
    base = None if method.from_scratch else base_policy(method, task, seed, data)
    name = f"{method.name}-{task.name}-{seed}"
    settings = [
        f"task={task.task}",
        f"algorithm={method.algorithm}",
        f"policy={method.head}",
        *task.settings,
        *method.settings,
        _budget(method, steps or task.env_steps, task),
        "evaluation.episodes=50",
        f"seed={seed}",
        f"out={WORK}/runs",
        f"name={name}",
    ]
    if base is not None:
        settings.append(f"init_from={base}")
    if method.demonstrations:
        settings.append(f"dataset={data}")
    folder = WORK / "runs" / name
    if not (folder / "report.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run left
        start_run(compose_config(settings)).train()
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    judged = {"base": judge(base, task), "finetuned": judge(folder / "checkpoints" / "last", task)}
    return {
        "method": method.name,
        "task": task.name,
        "seed": seed,
        **judged,
        "env_steps": report["env_steps"],
        "steps_to_goal": _first_crossing(folder),
        "seconds": round(report["seconds"], 1),
        "seconds_updating": report.get("seconds_updating"),
        "restored": report["restored"],
    }


def demonstrations(task: BenchTask, seed: int) -> Path:
    """The dataset of a task and seed, collected once."""
    folder = WORK / "data" / f"{task.name}-{seed}"
    if folder.exists():
        return folder
    words = ["collect", task.task, "--episodes", str(task.demonstrations), "--seed", str(100_000 + 1_000 * seed)]
    if task.source == "sac":
        words += ["--policy", str(_half_trained(task, seed)), "--keep-failures", "--stochastic"]
    _run(*words, "--out", str(folder))
    return folder


def base_policy(method: Method, task: BenchTask, seed: int, data: Path) -> Path:
    """The cloned base of a head, trained once for all methods that use it."""
    name = "-".join([method.head, *(part.replace(".", "_") for part in method.head_settings), task.name, str(seed)])
    last = WORK / "base" / name / "checkpoints" / "last"
    if not (WORK / "base" / name / "report.json").exists():
        shutil.rmtree(WORK / "base" / name, ignore_errors=True)
        _run(
            *("train", f"task={task.task}", f"policy={method.head}", "algorithm=bc", f"dataset={data}"),
            *(*task.settings, *method.head_settings, f"budget.updates={task.cloning_updates}"),
            *("evaluation.episodes=0", f"seed={seed}", f"out={WORK}/base", f"name={name}"),
        )
    return last


def judge(checkpoint: Path | None, task: BenchTask) -> dict[str, Any] | None:
    """Summary on the held-out seeds; kept beside the checkpoint."""
    if checkpoint is None:
        return None
    kept = checkpoint.parent.parent / f"judged_{checkpoint.name}.json"
    if not kept.exists():
        policy, _ = load_policy(checkpoint)
        with closing(make_sim(task.task, SimOptions(num_envs=32))) as sim:
            summary = evaluate(policy, sim, episodes=EPISODES, seed=HELD_OUT).summary()
        kept.write_text(json.dumps(summary), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def _half_trained(task: BenchTask, seed: int) -> Path:
    name = f"sac-{task.name}-{seed}"
    if not (WORK / "source" / name / "report.json").exists():
        shutil.rmtree(WORK / "source" / name, ignore_errors=True)
        _run(
            *("train", f"task={task.task}", "policy=squashed_gaussian", "algorithm=sac", *task.settings),
            *("sim.num_envs=8", f"budget.env_steps={task.source_steps}", "evaluation.episodes=10"),
            *(f"seed={seed}", f"out={WORK}/source", f"name={name}"),
        )
    return WORK / "source" / name / "checkpoints" / "last"


def _first_crossing(folder: Path) -> float | None:
    """Environment steps at the first evaluation that reached the goal; None if none did."""
    steps = 0.0
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        steps = row.get("train/env_steps", steps)
        success = row.get("eval/success")
        if success is not None and not math.isnan(success) and success >= GOAL:
            return steps
    return None


def _budget(method: Method, steps: int, task: BenchTask) -> str:
    """The budget in environment steps, or the updates that play as many at most: episodes may end early."""
    if not method.whole_episodes:
        return f"budget.env_steps={steps}"
    with closing(make_sim(task.task, SimOptions(num_envs=1))) as sim:
        longest = sim.spec.max_episode_steps
    envs = next(int(setting.split("=")[1]) for setting in method.settings if setting.startswith("sim.num_envs="))
    return f"budget.updates={max(1, steps // (envs * longest))}"


def _run(*words: str) -> None:
    if robopolicy(list(words)) != 0:
        raise Failed(f"robopolicy {' '.join(words)}")
