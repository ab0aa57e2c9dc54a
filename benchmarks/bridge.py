"""A trained policy over the bridge compared with the same policy in process, tick timing, a soak test and a fuzz test.

    python -m benchmarks.bridge --policy CHECKPOINT --quick      # under 5 minutes, nothing written
    python -m benchmarks.bridge --policy CHECKPOINT              # about 55 minutes: 100 episodes, 30 minutes of soak

`--policy` is a policy for manipulation/lift, by default the output of `make demo`. The parts:

* success: the same seeds in process, over DDS in lockstep at 20 Hz (which must give identical episodes) and over DDS in
  real time at 50 Hz, with the simulated robot in its own process. `kept` is the success rate over the bridge divided by
  the rate in process; `low` and `high` are 1 plus the bounds of the difference of paired rates (Newcombe), divided by
  the rate in process.
* punctuality: periods without a tick, and |period - 20 ms| at p50 and p99, over all ticks in real time. `--priority`
  gives the bridge and the robot real-time priority, as on a robot's computer.
* soak: the control loop at 200 Hz on loopback with a simulated robot in the same process. It compares memory and tick
  lateness in the last third of the time with the second third; the first third is warm-up.
* fuzz: `tests/deploy/fuzz_server.py`, damaged messages and frames for a policy server while another client sends
  requests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import print_result, write_result
from robopolicy.errors import UserError
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.intervals import paired_rates, wilson
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec
from robopolicy.training.checkpoint import load_policy
from robopolicy_robots.loop import ControlLoop
from robopolicy_robots.loop_options import LoopOptions
from robopolicy_robots.policy_runner import PolicyRunner
from robopolicy_robots.rate import set_realtime_priority
from robopolicy_robots.robot import load_robot
from robopolicy_robots.simulated.node import build, node_parser, task_of
from robopolicy_robots.states import State, Tick
from robopolicy_robots.task_embodiment import TaskEmbodiment
from robopolicy_robots.transports.base import open_transport

NOTES = [
    "`kept` is the success rate over the bridge divided by the rate in process, on the same seeds of one policy. Its "
    "brackets are a 95 % interval over the episodes, from the difference of the paired rates (Newcombe)."
]
TASK, SEED = "manipulation/lift", 10_000
SOAK_RATE = 200.0  # [Hz]
MODES = {"lockstep": ["--lockstep", "--rate", "20"], "real time": []}
FUZZER = Path(__file__).parents[1] / "tests" / "deploy" / "fuzz_server.py"


def in_process(policy: str, episodes: int) -> NDArray[np.bool_]:
    """Success per seed of an evaluation in process."""
    sim = make_sim(TASK, SimOptions(num_envs=1))
    found = evaluate(load_policy(policy)[0], sim, episodes=episodes, seed=SEED, policy_batch=1)
    sim.close()
    return np.asarray(found.success, bool)


def over_the_bridge(policy: str, episodes: int, words: list[str]) -> dict[str, Any]:
    """Run `robopolicy deploy` and return its report."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "robopolicy", "deploy", "--robot", "sim_panda", "--policy", policy]
        command += ["--task", TASK, "--episodes", str(episodes), "--seed", str(SEED), "--no-tui", "--out", str(out)]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        if not out.exists():
            raise UserError(f"robopolicy deploy failed: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(out.read_text())


def paired(first: NDArray[np.bool_], report: dict[str, Any]) -> dict[str, Any]:
    """Success over the bridge compared with success in process, on the same seeds."""
    second = np.array([bool(each["success"]) for each in report["episodes"]])
    if len(second) != len(first):
        raise UserError(f"Only {len(second)} of {len(first)} episodes came to an end over the bridge.")
    both, ours = int((first & second).sum()), int((~first & second).sum())
    theirs, neither = int((first & ~second).sum()), int((~first & ~second).sum())
    difference, rate = paired_rates(both, ours, theirs, neither), max(first.mean(), 1e-9)
    alone = wilson(int(second.sum()), len(second))
    return {
        "in_process": float(first.mean()),
        "success": alone.estimate,
        "success_low": alone.low,
        "success_high": alone.high,
        "kept": float(second.mean() / rate),
        "low": float(1.0 + difference.low / rate),
        "high": float(1.0 + difference.high / rate),
        "only_in_process": theirs,
        "only_over_the_bridge": ours,
        **{key: report[key] for key in ("ticks", "deadline_misses", "deadline_miss_share", "holds", "interventions")},
        **{key: report[key] for key in ("jitter_p50_ms", "jitter_p99_ms", "period_p99_ms", "inference_p95_ms")},
    }


class Swaying:
    """A policy that moves back and forth at no computing cost."""

    takes_prefix = False

    def __init__(self, width: int) -> None:
        self.spec = PolicySpec({"state": (width,)}, action_dim=5, horizon=8, action_horizon=4)
        self._asked = 0

    def chunk(self, obs: Any, prefix: Any = None) -> NDArray[np.float32]:
        """Move at 0.3 of full speed to one side, then to the other."""
        self._asked += 1
        chunk = np.zeros((8, 5), np.float32)
        chunk[:, 1], chunk[:, 4] = (0.3 if self._asked % 4 < 2 else -0.3), -1.0
        return chunk

    def close(self) -> None:
        """Do nothing: no resource is open."""


def memory() -> float:
    """Resident memory of this process [MiB]."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024.0


def soak(seconds: float, domain: int = 77) -> dict[str, Any]:
    """Run the loop at 200 Hz; returns how memory and lateness change."""
    words = ["--transport", "loopback", "--domain", str(domain), "--rate", str(SOAK_RATE), "--task", TASK]
    node, over = build(node_parser().parse_args(words)), threading.Event()
    thread = threading.Thread(target=node.run, args=(over.is_set,), daemon=True)
    thread.start()
    robot, task = replace(load_robot("sim_panda"), rate=SOAK_RATE), task_of(TASK)
    late: list[float] = []  # |period - 5 ms| [s] of the ticks in the current part
    lateness: list[tuple[float, float]] = []  # (p50, p99) [s] of each part
    sizes: list[float] = []
    part = max(seconds / 60.0, 1.0)
    before_now = time.monotonic()
    due, holds, state = before_now + part, 0, State.DISCONNECTED

    def note(tick: Tick) -> None:
        nonlocal due, before_now, holds, state
        late.append(abs(tick.now - before_now - robot.dt))
        before_now = tick.now
        if tick.state is not state:
            holds, state = holds + (tick.state is State.HOLD), tick.state
        if tick.now >= due:
            due += part
            lateness.append(tuple(np.quantile(late, (0.5, 0.99))))  # type: ignore[arg-type]
            sizes.append(memory())
            late.clear()

    transport = open_transport("loopback", domain=domain)
    runner = PolicyRunner(Swaying(task.observation["state"].shape[0]))
    loop = ControlLoop(robot, transport, TaskEmbodiment(task, "panda_"), runner, LoopOptions(on_tick=note))
    loop.arm()
    loop.run(seconds)
    over.set()
    thread.join(5.0)
    transport.close()
    node.close()
    third = len(sizes) // 3
    before, after = slice(third, 2 * third), slice(2 * third, None)
    p50, p99 = 1e3 * np.array(lateness).T
    return {
        "seconds": seconds,
        "rate": SOAK_RATE,
        "ticks": loop.ticks,
        "deadline_misses": loop.overruns,
        "memory_mib": float(np.mean(sizes[after])),
        "memory_growth_mib": float(np.mean(sizes[after]) - np.mean(sizes[before])),
        "lateness_p50_ms": [float(np.median(p50[before])), float(np.median(p50[after]))],
        "lateness_p99_ms": [float(np.median(p99[before])), float(np.median(p99[after]))],
        "interventions": dict(loop.log.counts),
        "holds": holds,
        "last_state": str(state),
    }


def fuzz(frames: int) -> dict[str, Any]:
    """Run the fuzzer and return its result."""
    done = subprocess.run([sys.executable, str(FUZZER), str(frames)], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [""]
    return {"frames": frames, "survived": done.returncode == 0, "found": lines[0]}


def rows_of(figures: dict[str, Any]) -> list[dict[str, object]]:
    """Table rows."""
    rows: list[dict[str, object]] = []
    for name in MODES:
        if name in figures:
            f = figures[name]
            found = f"{100 * f['success']:.1f} % against {100 * f['in_process']:.1f} % in process"
            more = f"kept {f['kept']:.3f} [{f['low']:.3f}, {f['high']:.3f}]"
            if name == "real time":
                more += f"; {f['deadline_misses']} of {f['ticks']} ticks missed; jitter p50 {f['jitter_p50_ms']} ms"
                more += f", p99 {f['jitter_p99_ms']} ms"
            rows.append({"part": f"success, {name}", "result": found, "details": more})
    if "soak" in figures:
        f = figures["soak"]
        before, after = f["lateness_p99_ms"]
        missed = f"{f['deadline_misses']} of {f['ticks']} missed"
        rows.append(
            {
                "part": f"soak, {f['seconds']:g} s at {f['rate']:g} Hz",
                "result": f"memory {f['memory_growth_mib']:+.2f} MiB of {f['memory_mib']:.0f}",
                "details": f"lateness p99 {before:.2f} -> {after:.2f} ms; {missed}",
            }
        )
    if "fuzz" in figures:
        f = figures["fuzz"]
        rows.append({"part": f"fuzz, {f['frames']} frames", "result": "survived" if f["survived"] else "FAILED"})
        rows[-1]["details"] = f["found"]
    return rows


def main() -> None:
    """Measure, print, and write the results of a full run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="runs/demo/finetuned/checkpoints/best", help="checkpoint for lift")
    parser.add_argument(
        "--quick", action="store_true", help="10 episodes, 30 s of soak, 1000 frames; no results written"
    )
    parser.add_argument("--only", nargs="*", choices=("success", "soak", "fuzz"), help="parts to run (default: all)")
    parser.add_argument("--minutes", type=float, default=30.0, help="duration of the soak test (default: 30)")
    parser.add_argument("--priority", help="real-time priority, except in lockstep; see 'robopolicy deploy'")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = arguments.only or ("success", "soak", "fuzz")
    episodes, seconds, frames = (10, 30.0, 1000) if arguments.quick else (100, 60.0 * arguments.minutes, 100_000)
    figures: dict[str, Any] = {"episodes": episodes, "priority": arguments.priority}
    if "success" in wanted:
        first = in_process(arguments.policy, episodes)
        for name, words in MODES.items():
            more = ["--priority", arguments.priority] if arguments.priority and name == "real time" else []
            figures[name] = paired(first, over_the_bridge(arguments.policy, episodes, [*words, *more]))
    if "fuzz" in wanted:
        figures["fuzz"] = fuzz(frames)
    if "soak" in wanted:  # last: the priority stays set for the rest of the process
        if arguments.priority:
            set_realtime_priority(int(arguments.priority))
        figures["soak"] = soak(seconds)
    rows = rows_of(figures)
    print_result("bridge", rows, figures)
    if not arguments.quick and not arguments.only:
        priority = f" --priority {arguments.priority}" if arguments.priority else ""
        command = f"python -m benchmarks.bridge --policy {arguments.policy}{priority}"
        write_result("bridge", rows, figures, command=command, notes=NOTES)


if __name__ == "__main__":
    main()
