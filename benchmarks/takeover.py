"""Demonstrations and corrections by a scripted person at a gamepad: success of cloning before and after DAgger.

    python -m benchmarks.takeover --quick    # little training, nothing written
    python -m benchmarks.takeover            # about ten minutes on one core

The commands are what a new user types. A person at a gamepad demonstrates 10 episodes of lift, a flow policy is cloned,
the person watches 10 of its episodes and takes over where it has not lifted the cube after `PATIENCE` steps, and DAgger
trains on both. The control trains as many further updates without corrections. The gamepad is a virtual joystick of
SDL, read by the device `gamepad`; the scripted person moves it as the expert of the task would act, in real time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.common import print_result, write_result
from benchmarks.virtual_gamepad import VirtualGamepad
from robopolicy.cli.main import main as robopolicy
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, get_task, register
from robopolicy.sim.wrappers.base import unwrapped
from robopolicy.teleop.contract import TeleopCommand
from robopolicy.teleop.devices import DEVICES
from robopolicy.teleop.gamepad import GamepadTeleop

LIFT = get_task("manipulation/lift")
TASK = "person/lift"  # the same task, whose simulator the scripted person sees
PATIENCE = 25  # steps without success after which the person takes over; the expert lifts the cube within 20
HELD_OUT = 50_000  # first seed of the evaluation


class ScriptedPerson(GamepadTeleop):
    """Gamepad in the hands of a person who acts as the expert of the task."""

    sims: list[VectorSim] = []  # noqa: RUF012  (all simulators of the task)

    def __init__(self, *, corrects: bool) -> None:
        self._virtual = VirtualGamepad()
        super().__init__(self._virtual.index)
        self._sim = next(sim for sim in reversed(self.sims) if sim.num_envs == 1)
        self._expert = LIFT.require_expert()()
        self._corrects = corrects  # a policy acts in the session
        self._enabled = False

    @classmethod
    def open(cls, argument: str = "") -> Self:
        """Take the gamepad to demonstrate, or to correct a policy (`correct`)."""
        return cls(corrects=argument == "correct")

    def read(self, now: float) -> TeleopCommand:
        """Move the gamepad as the person does after the newest image, and read it."""
        acts = not self._corrects or int(self._sim.episode_step[0]) >= PATIENCE
        action = self._expert(unwrapped(self._sim), {})[0].numpy() if acts else np.zeros(5)
        speed = np.array([*action[:3], 0.0, 0.0, action[3]])
        self._virtual.enable(acts)
        self._virtual.twist(speed if acts and self._enabled else np.zeros(6))  # neutral when the switch is pressed
        self._virtual.gripper(float(action[4]))
        self._enabled = acts
        return super().read(now)

    def close(self) -> None:
        """Put the gamepad away."""
        super().close()
        self._virtual.unplug()


def make(options: SimOptions) -> VectorSim:
    """Build the simulator and show it to the person."""
    sim = LIFT.make(options)
    ScriptedPerson.sims.append(sim)
    return sim


def run(*words: str) -> dict[str, Any]:
    """Run a command of a user; return the JSON object that it prints, if any."""
    print("robopolicy", *words, flush=True)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = robopolicy(words)
    if code:
        raise SystemExit(code)
    lines = output.getvalue().strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """Result of a function and its wall time [s]."""
    begin = time.perf_counter()
    return action(), time.perf_counter() - begin


def notes(figures: dict[str, Any]) -> list[str]:
    """Sentences below the table."""
    corrected, total = figures["dagger/corrected"], figures["total"]
    return [
        f"The person acted on {corrected:.0%} of the frames of the 10 corrected episodes.",
        f"All commands took {total} s, with one thread: demonstrations in real time, three trainings, 600 episodes.",
        "Wilson intervals of 200 held-out episodes of one training seed.",
    ]


def main() -> None:
    """Run the commands and report success and wall times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little training, nothing written")
    quick = parser.parse_args().quick
    updates, episodes = (50, 10) if quick else (1000, 200)
    register(replace(LIFT, name=TASK, make=make))
    DEVICES.register("person", ScriptedPerson)
    with tempfile.TemporaryDirectory() as folder:
        data, runs = Path(folder) / "demonstrations", Path(folder) / "runs"
        common = [
            f"out={runs}",
            f"task.name={TASK}",
            f"dataset={data}",
            "evaluation.episodes=0",
            f"budget.updates={updates}",
        ]
        start = f"init_from={runs}/cloned/checkpoints/last"
        person = ["algorithm.demonstrator=person:correct", "algorithm.rounds=1", "algorithm.episodes_per_round=10"]
        stages: dict[str, list[str]] = {
            "cloned": ["experiment=few_demonstrations"],
            "dagger": ["algorithm=dagger", start, *person, "sim.num_envs=1"],
            "control": ["experiment=few_demonstrations", start],
        }
        options = ["--device", "person", "--episodes", "10", "--out", str(data), "--json"]
        report, seconds = timed(lambda: run("teleop", TASK, *options))
        times = {"teleoperate": seconds}
        rows: list[dict[str, object]] = []
        figures: dict[str, Any] = {"demonstrated_frames": report["frames"]}
        for name, settings in stages.items():
            _, times[name] = timed(lambda name=name, own=settings: run("train", *own, *common, f"name={name}"))
            checkpoint = f"{runs}/{name}/checkpoints/last"
            options = ["--task", TASK, "--episodes", str(episodes), "--seed", str(HELD_OUT), "--json"]
            result, times[f"evaluate {name}"] = timed(lambda at=checkpoint, options=options: run("eval", at, *options))
            found = next(iter(result["results"].values()))
            figures[name] = {key: found[key] for key in ("success", "low", "high")}
            rows.append({"policy": name, "success": "{success:.1%} [{low:.1%}, {high:.1%}]".format(**figures[name])})
            if name == "dagger":
                metrics = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
                figures |= {key: metrics[-1][key] for key in metrics[-1] if key.startswith("dagger/")}
    figures |= {"seconds": {key: round(value, 1) for key, value in times.items()}, "total": round(sum(times.values()))}
    print_result("takeover", rows, figures)
    if not quick:
        write_result("takeover", rows, figures, command="python -m benchmarks.takeover", notes=notes(figures))


if __name__ == "__main__":
    main()
