"""Velocity tracking and robustness of a trained quadruped: tables, intervals and a video.

    python -m benchmarks.walking --quick                                        # few episodes, nothing written
    python -m benchmarks.walking runs/go1_ppo/checkpoints/best                  # about 10 minutes

Two tables over held-out episodes of 20 s with deterministic actions. *Commands*: one command for the whole episode on
the nominal robot; the first second is not counted. *Robustness*: random commands while one parameter differs from the
nominal robot, up to values outside the training range. Errors are means over an episode, with a bootstrap interval over
episodes; as in the task, an episode succeeds with no fall and a mean velocity error below 0.25 m/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.common import RESULTS, print_result, write_result
from robopolicy.evaluation.intervals import bootstrap_mean, wilson
from robopolicy.evaluation.video import record, write_video
from robopolicy.policies.base import Policy
from robopolicy.sim.backends.mujoco.backend import make_mujoco
from robopolicy.sim.registry import SimOptions
from robopolicy.training.checkpoint import load_policy
from robopolicy_tasks.velocity.go1 import ACTION_SCALE, SEGMENTS, Go1
from robopolicy_tasks.velocity.randomization import NOMINAL, TRAINING, Randomization

NOTE = "One policy, trained with `experiment=go1_ppo`; intervals are of its episodes, not of its training."
SEED = 70_000  # first held-out episode
SETTLE = 1.0  # [s] from the start, not counted
COMMANDS = {
    "stand": (0.0, 0.0, 0.0),
    "forward 0.5 m/s": (0.5, 0.0, 0.0),
    "forward 1 m/s": (1.0, 0.0, 0.0),
    "backward 0.5 m/s": (-0.5, 0.0, 0.0),
    "backward 1 m/s": (-1.0, 0.0, 0.0),
    "left 0.5 m/s": (0.0, 0.5, 0.0),
    "right 0.5 m/s": (0.0, -0.5, 0.0),
    "turn left 1 rad/s": (0.0, 0.0, 1.0),
    "turn right 1 rad/s": (0.0, 0.0, -1.0),
    "forward 0.7 m/s, turn 0.7 rad/s": (0.7, 0.0, 0.7),
}
ROBOTS = {
    "nominal": NOMINAL,
    "as in training": TRAINING,
    "friction 0.4": Randomization(friction=(0.4, 0.4)),
    "friction 0.2 (unseen)": Randomization(friction=(0.2, 0.2)),
    "payload 3 kg": Randomization(payload=(3.0, 3.0)),
    "payload 5 kg (unseen)": Randomization(payload=(5.0, 5.0)),
    "motors 15 % weaker": Randomization(motor_strength=(0.85, 0.85)),
    "motors 30 % weaker (unseen)": Randomization(motor_strength=(0.7, 0.7)),
    "pushes to 0.6 m/s": Randomization(push=0.6),
    "pushes to 1.2 m/s (unseen)": Randomization(push=1.2),
    "sensor noise": Randomization(noise=1.0),
    "twice the sensor noise (unseen)": Randomization(noise=2.0),
}

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """One episode per entry `(n,)`."""

    success: NDArray[np.bool_]
    fallen: NDArray[np.bool_]
    velocity_error: Numbers  # [m/s] mean
    turning_error: Numbers  # [rad/s] mean
    power: Numbers  # [W] mean mechanical power
    action_rate: Numbers  # [rad/s] mean speed of the joint targets
    action_jerk: Numbers  # [rad/s^2] mean change of that speed


def walk(policy: Policy, task: Go1, episodes: int) -> Walk:
    """Run the first `episodes` held-out episodes of `task`."""
    with closing(make_mujoco(task, SimOptions(num_envs=episodes))) as sim:
        obs, alive = sim.reset(SEED), torch.ones(episodes, dtype=torch.bool)
        sums = {key: torch.zeros(episodes) for key in ("velocity_error", "turning_error", "power", "rate", "jerk")}
        counted, success, fallen = torch.zeros(episodes), torch.zeros(episodes, dtype=torch.bool), ~alive
        actions: list[Tensor] = []
        settle = round(SETTLE / task.dt)
        for number in range(task.max_episode_steps):
            seen = {key: obs[key].unsqueeze(1) for key in policy.spec.observation}
            action = policy.act(seen, deterministic=True)[:, 0].clamp(-1, 1)
            step = sim.step(action)
            actions = [*actions[-2:], action]
            if number >= settle:
                terms = {key: step.info[key] for key in ("velocity_error", "turning_error", "power")}
                terms["rate"], terms["jerk"] = _smoothness(actions, task.dt)
                for key, value in terms.items():
                    sums[key] += torch.where(alive, value.float(), 0.0)
                counted += alive
            success |= alive & step.info["success"]
            fallen |= alive & step.terminated
            alive &= ~step.done
            obs = step.obs
            if not bool(alive.any()):
                break
    mean = {key: (value / counted.clamp(min=1)).double().numpy() for key, value in sums.items()}
    means = (mean["velocity_error"], mean["turning_error"], mean["power"], mean["rate"], mean["jerk"])
    return Walk(success.numpy(), fallen.numpy(), *means)


def _smoothness(actions: Sequence[Tensor], dt: float) -> tuple[Tensor, Tensor]:
    """Mean speed [rad/s] of the joint targets and mean change of it [rad/s^2], per environment."""
    first, second, third = (ACTION_SCALE * action for action in actions)
    speed = (third - second).abs().mean(1) / dt
    return speed, (third - 2 * second + first).abs().mean(1) / dt**2


def film(policy: Policy, path: Path) -> Path:
    """Record a video of one episode with random commands on the nominal robot."""
    with closing(make_mujoco(Go1("velocity/go1", "sparse"), SimOptions(num_envs=1))) as sim:
        clips = record(policy, sim, [SEED], camera="front", width=640, height=480)
    return write_video([clips], path)


def row(name: str, found: Walk) -> tuple[dict[str, object], dict[str, Any]]:
    """Row of a table, and the same numbers for programs."""
    success, falls = wilson(int(found.success.sum()), len(found.success)), int(found.fallen.sum())
    velocity, turning = bootstrap_mean(found.velocity_error), bootstrap_mean(found.turning_error)
    line: dict[str, object] = {
        "command or robot": name,
        "success [95 %]": f"{success:.1%}",
        "falls": f"{falls} of {len(found.fallen)}",
        "velocity error [m/s]": f"{velocity:.3f}",
        "turning error [rad/s]": f"{turning:.3f}",
        "power [W]": round(float(found.power.mean())),
        "target speed [rad/s]": round(float(found.action_rate.mean()), 2),
        "target acceleration [rad/s2]": round(float(found.action_jerk.mean())),
    }
    entry = {"success": success.estimate, "low": success.low, "high": success.high, "n": success.n, "falls": falls}
    errors = {"velocity_error": velocity, "turning_error": turning}
    entry |= {key: {"value": e.estimate, "low": e.low, "high": e.high} for key, e in errors.items()}
    return line, entry


def main() -> None:
    """Run all episodes, then print and write the tables and the video."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="runs/go1_ppo/checkpoints/best")
    parser.add_argument("--quick", action="store_true", help="few episodes and commands, no results written")
    arguments = parser.parse_args()
    policy = load_policy(arguments.checkpoint)[0].eval()
    few, many = (4, 8) if arguments.quick else (20, 100)
    rows: list[dict[str, object]] = []
    figures: dict[str, Any] = {"commands": {}, "robustness": {}}
    for name, command in list(COMMANDS.items())[: 2 if arguments.quick else None]:
        task = Go1("velocity/go1", "sparse", NOMINAL, np.tile(np.array(command), (SEGMENTS, 1)))
        line, figures["commands"][name] = row(name, walk(policy, task, few))
        rows.append(line)
    for name, ranges in list(ROBOTS.items())[: 2 if arguments.quick else None]:
        line, figures["robustness"][name] = row(name, walk(policy, Go1("velocity/go1", "sparse", ranges), many))
        rows.append(line)
    print_result("walking", rows, figures)
    if not arguments.quick:
        write_result("walking", rows, figures, command="python -m benchmarks.walking", notes=[NOTE])
        film(policy, RESULTS / "walking.mp4")


if __name__ == "__main__":
    main()
