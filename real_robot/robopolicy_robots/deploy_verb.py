"""`robopolicy deploy`: a policy drives a robot, real or simulated; the line that differs is the robot's YAML."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from robopolicy.cli.commands import Command
from robopolicy.cli.options import add_overwrite_option, check_numbers
from robopolicy_robots.reach import add_options
from robopolicy_robots.robot import robot_names

COMMAND = Command(__name__, "drive a robot, real or simulated, with a policy")

EXAMPLES = """\
examples:
  robopolicy deploy --robot sim_panda --policy runs/lift_flow_bc/checkpoints/best --task manipulation/lift --episodes 20
  robopolicy deploy --robot sim_panda --policy ws://127.0.0.1:8765 --task manipulation/lift --record run.mcap
  robopolicy deploy --robot sim_panda --policy runs/lift_flow_bc/checkpoints/best --task lift --lockstep --rate 20
  robopolicy deploy --robot my_panda.yaml --policy bundles/lift --task manipulation/lift --transport auto --check
  robopolicy deploy --robot my_panda.yaml --policy bundles/lift --task manipulation/lift --transport auto --dry-run
  robopolicy deploy --robot my_panda.yaml --policy bundles/lift --task manipulation/lift --dry-run --browser

my_panda.yaml is a copy of robopolicy_robots/robots/franka_panda.yaml with the topic of the task's cube:
  sources:
    object.cube: {topic: /objects/cube/pose, kind: geometry_msgs/msg/PoseStamped, qos: sensor}
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "deploy",
        description="Run the control loop of a policy on a robot behind the safety layer. A simulated robot is started "
        "in a process of its own, plays numbered episodes and is scored; a real one moves until you stop it.",
        epilog=EXAMPLES,
    )
    shipped = ", ".join(robot_names())
    parser.add_argument("--robot", required=True, help=f"a YAML file of your own, or one that is shipped: {shipped}")
    parser.add_argument("--policy", required=True, help="folder of a bundle or a checkpoint, or ws://HOST:PORT")
    parser.add_argument("--task", required=True, help="task that the policy was trained on, e.g. manipulation/lift")
    add_options(parser)
    parser.add_argument("--episodes", type=int, default=1, help="episodes of a simulated robot (default: 1)")
    parser.add_argument("--seed", type=int, default=10_000, help="seed of the first episode (default: 10000)")
    parser.add_argument("--seconds", type=float, help="stop after this time (default: when told to)")
    parser.add_argument("--rate", type=float, help="ticks of the control loop per second (default: the robot's)")
    parser.add_argument("--priority", type=int, help="real-time priority from 1 to 99, for a computer with other work")
    parser.add_argument("--join", default="replace", help="of chunks: replace, hold, ensemble, rtc (default: replace)")
    parser.add_argument(
        "--support", metavar="DATASET", help="what the policy learned from; actions that it does not support are bent"
    )
    parser.add_argument(
        "--unsupported", default="hold", help="what is done about them: hold, slow, refuse (default: hold)"
    )
    parser.add_argument("--device", default="cpu", help="where a checkpoint computes (default: cpu)")
    parser.add_argument("--lockstep", action="store_true", help="simulated time passes with commands, not by itself")
    parser.add_argument("--attach", action="store_true", help="use a simulated robot that runs already")
    parser.add_argument("--dry-run", action="store_true", help="compute everything, send nothing")
    parser.add_argument(
        "--check", action="store_true", help="check that all is there and fits; drive nothing; 2 if not"
    )
    parser.add_argument("--record", type=Path, metavar="FILE.mcap", help="record what is heard, sent and filtered")
    parser.add_argument("--out", type=Path, help="report (default: the next free one of runs/deploy/report.json, ...)")
    add_overwrite_option(parser)
    parser.add_argument(
        "--browser",
        nargs="?",
        const="127.0.0.1:8780",
        metavar="[HOST:]PORT",
        help="show the run on a web page, with an emergency stop (default: 127.0.0.1:8780)",
    )
    parser.add_argument("--plain", action="store_true", help="lines in place of the live view")


def run(args: argparse.Namespace) -> int:
    """Drive; 0 when it ended as it should, 1 when the robot was stopped by the safety layer, 2 when a check failed."""
    from robopolicy.errors import UserError
    from robopolicy.sim.gl import check_choice

    check_numbers(args, positive=("episodes",), non_negative=("seed",))
    for name in ("rate", "seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be a positive number, got {value:g}.")
    check_choice()  # MuJoCo is imported next
    from robopolicy_robots.deployment import deploy

    return deploy(args)
