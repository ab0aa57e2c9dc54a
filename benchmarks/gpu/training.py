"""Steps that train by the command line: Go1 to its threshold, fine-tuning on lift, FlashSAC, and text."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common import Row
from benchmarks.gpu.records import Options
from robopolicy.cli.main import main as command_line

THRESHOLD = 80.0  # return of mjlab's Go1 on flat ground, where published runs of PPO end at 89 to 95
EVERY = 20.0  # [s] between rows of a curve
RETURN, SUCCESS = "rollout/return", "eval/success"


def training(
    name: str, settings: Sequence[str], options: Options, seconds: float
) -> Generator[dict[str, Any], None, None]:
    """Rows of the metrics of `robopolicy train`, with the seconds since its start; it is stopped after `seconds`.

    Raises:
        RuntimeError: The command fails, or writes no row in time.
    """
    folder, log = options.work / name, options.work / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    options.work.mkdir(parents=True, exist_ok=True)
    words = [*settings, f"device={options.device}", f"out={options.work}", f"name={name}"]
    with log.open("w") as stream:
        command = [sys.executable, "-m", "robopolicy", "train", *words]
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
    start, read = time.monotonic(), 0
    try:
        while True:
            ended = process.poll() is not None
            rows = complete_rows(folder / "metrics.jsonl")
            elapsed = round(time.monotonic() - start, 1)
            for row in rows[read:]:
                yield {**row, "seconds": elapsed}
            read = len(rows)
            if ended or elapsed > seconds:
                break
            time.sleep(0.2)
        if process.returncode or not read:
            reason = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"robopolicy train {name}: {reason}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def complete_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file, without one that is still being written."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def curve(name: str, settings: Sequence[str], options: Options, seconds: float, threshold: float) -> Iterator[Row]:
    """Return over time, a row every `EVERY` seconds; training ends at `threshold`."""
    metrics: dict[str, Any] = {}
    last = -EVERY
    with closing(training(name, settings, options, seconds)) as records:
        for record in records:
            metrics |= record
            reached = metrics.get(RETURN, float("-inf")) >= threshold
            if reached or metrics["seconds"] - last >= EVERY:
                last = metrics["seconds"]
                yield point(name, metrics, threshold if reached else None)
            if reached:
                return
    if metrics["seconds"] > last:
        yield point(name, metrics, None)


def point(name: str, metrics: dict[str, Any], reached: float | None) -> Row:
    """Row of a curve."""
    steps = metrics.get("train/env_steps", 0)
    return {
        "run": name,
        "seconds": metrics["seconds"],
        "env steps": steps,
        "env steps/s, start included": steps / max(metrics["seconds"], 1e-9),
        "return": metrics.get(RETURN, "-"),
        "note": f"reached {reached:g}" if reached is not None else "-",
    }


def go1(options: Options) -> Iterator[Row]:
    """PPO on mjlab's Go1 until its return reaches the threshold."""
    settings = ["experiment=mjlab_go1_ppo", "evaluation.episodes=0", "logging.every=5"]
    if options.quick:
        settings += ["sim.num_envs=4", "algorithm.num_steps=4", "algorithm.batch_size=8", "algorithm.epochs=1"]
        settings += ["budget.updates=1", "logging.every=1"]
    yield from curve("go1_ppo", settings, options, 450, THRESHOLD)


def flashsac(options: Options) -> Iterator[Row]:
    """FlashSAC on mjlab's Go1 for some minutes, or until its return reaches the threshold."""
    settings = ["experiment=mjlab_go1_flashsac", "evaluation.episodes=0", "logging.every=50"]
    if options.quick:
        settings += ["sim.num_envs=4", "algorithm.batch_size=8", "replay.learning_starts=16", "replay.capacity=1000"]
        settings += ["budget.env_steps=24", "logging.every=1", "algorithm.precision=float32"]
    yield from curve("go1_flashsac", settings, options, 135, THRESHOLD)


def lift(options: Options) -> Iterator[Row]:
    """ReinFlow and DSRL on a flow that imitates few demonstrations of lift; success is measured natively."""
    demos = options.work / "lift_demos"
    shutil.rmtree(demos, ignore_errors=True)
    command_line(["collect", "lift", "--episodes", "2" if options.quick else "50", "--out", str(demos)])
    tests = ["evaluation.backend=mujoco", f"evaluation.episodes={2 if options.quick else 200}"]
    tests += ["evaluation.num_envs=100", "evaluation.max_fraction=0", "guards.restore_best=false"]
    small = ["policy.hidden=[8]", "budget.updates=1"] if options.quick else []
    base = ["experiment=few_demonstrations", "task=lift", f"dataset={demos}", *tests, *small]
    for record in training("lift_flow_bc", base, options, 80):
        if SUCCESS in record:
            yield outcome("bc", 0, record)
    start = [f"init_from={options.work / 'lift_flow_bc' / 'checkpoints' / 'last'}", "sim.backend=warp", *tests]
    for num_envs in (4,) if options.quick else (1024, 4096):
        common = [*start, f"sim.num_envs={num_envs}"]
        steps = 16 * num_envs  # decisions of a rollout
        runs = {
            "reinflow": [f"algorithm.batch_size={steps // 16}", "budget.updates=30", "evaluation.every=10"],
            "dsrl_sac": ["algorithm.gradient_steps=16", "budget.updates=400"],
        }
        runs["dsrl_sac"] += [f"replay.learning_starts={8 * num_envs}", "evaluation.every=200"]
        if options.quick:
            runs["reinflow"] += ["budget.updates=1", "algorithm.num_steps=2", "algorithm.batch_size=4"]
            runs["dsrl_sac"] += ["budget.updates=1", "algorithm.batch_size=8"]
        kinds = {"reinflow": "fine_tune", "dsrl_sac": "offline_to_online"}
        for name, settings in runs.items():
            words = [f"experiment={kinds[name]}", f"algorithm={name}", *common, *settings, "logging.every=1"]
            metrics: dict[str, Any] = {}
            record: dict[str, Any] = {}
            for record in training(f"lift_{name}_{num_envs}", words, options, 65):
                metrics |= record
                if SUCCESS in record:
                    yield outcome(name, num_envs, metrics)
            if SUCCESS not in record:
                yield outcome(name, num_envs, metrics)


def outcome(method: str, num_envs: int, metrics: dict[str, Any]) -> Row:
    """Row of a run on lift."""
    steps = metrics.get("train/env_steps", 0)
    return {
        "method": method,
        "environments": num_envs,
        "update": metrics.get("update", "-"),
        "seconds": metrics["seconds"],
        "env steps": steps,
        "env steps/s, start and evaluations included": steps / max(metrics["seconds"], 1e-9),
        "success": metrics.get(SUCCESS, "-"),
        "success in rollouts": metrics.get("rollout/success", "-"),
    }


def text(options: Options) -> Iterator[Row]:
    """Tokens per second of GRPO on additions, updates included."""
    sizes = ["algorithm.sft_updates=0", f"budget.updates={2 if options.quick else 40}", "evaluation.episodes=0"]
    sizes += ["algorithm.prompts_per_update=4"] if options.quick else ["algorithm.prompts_per_update=128"]
    words = ["experiment=text_grpo", *sizes, "logging.every=1"]
    records = list(training("text_grpo", words, options, 40))
    first, last = records[0], records[-1]
    tokens, seconds = (last.get(key, 0) - first.get(key, 0) for key in ("rollout/tokens", "seconds"))
    updates = last["update"] - first["update"]
    yield {"updates": updates, "tokens": tokens, "seconds": seconds, "tokens/s": tokens / max(seconds, 1e-9)}
