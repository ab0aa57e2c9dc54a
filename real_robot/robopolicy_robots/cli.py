"""Command `robopolicy deploy`: run a policy on a real or simulated robot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from robopolicy.cli.commands import Command
from robopolicy.cli.display import add_display_option
from robopolicy.cli.options import add_overwrite_option, check_numbers

REGISTRIES = ("robopolicy_robots.transports:TRANSPORTS",)
COMMAND = Command(__name__, "run a policy on a real or simulated robot", registries=REGISTRIES)

EXAMPLES = """\
examples:
  robopolicy deploy --robot sim_panda --policy runs/lift_flow_bc/checkpoints/best --task manipulation/lift --episodes 20
  robopolicy deploy --robot sim_panda --policy ws://127.0.0.1:8765 --task manipulation/lift --record run.mcap
  robopolicy deploy --robot sim_panda --policy runs/lift_flow_bc/checkpoints/best --task lift --lockstep --rate 20
  robopolicy deploy --robot my_panda.yaml --policy bundles/lift --task manipulation/lift --transport auto --check
  robopolicy deploy --robot my_panda.yaml --policy bundles/lift --task manipulation/lift --transport auto --dry-run
  robopolicy deploy --robot my_panda.yaml --policy bundles/lift --task manipulation/lift --dry-run --browser
  robopolicy deploy --robot my_arm.yaml --policy runs/my_arm_flow_bc_seed0/checkpoints/best --task none --check
  robopolicy deploy --robot my_arm.yaml --task none --teleop lerobot:so101_leader:/dev/ttyACM1 --demonstrations data/arm

my_panda.yaml is a copy of robopolicy_robots/robots/franka_panda.yaml with the topic of the cube:
  sources:
    object.cube: {topic: /objects/cube/pose, type: geometry_msgs/msg/PoseStamped, qos: sensor}
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    from robopolicy_robots.connection import add_options
    from robopolicy_robots.robot import robot_names

    parser: argparse.ArgumentParser = subparsers.add_parser(
        "deploy",
        description="Run the control loop of a policy on a robot behind the safety layer. A simulated robot starts "
        "in its own process and runs scored episodes; a real robot moves until you stop it.",
        epilog=EXAMPLES,
    )
    shipped = ", ".join(robot_names())
    parser.add_argument("--robot", required=True, help=f"YAML file, or name of a shipped robot: {shipped}")
    parser.add_argument("--policy", help="folder of a bundle or a checkpoint, or ws://HOST:PORT")
    text = "a person at a device moves the robot, or takes over from --policy; see 'robopolicy list teleops'"
    parser.add_argument("--teleop", metavar="DEVICE", help=text)
    text = "dataset to write of the episodes with --teleop (default: none)"
    parser.add_argument("--demonstrations", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--task", required=True, help="task of the policy; none: joints and cameras of the robot alone")
    add_options(parser)
    parser.add_argument("--episodes", type=int, default=1, help="episodes of a simulated robot (default: 1)")
    parser.add_argument("--seed", type=int, default=10_000, help="seed of the first episode (default: 10000)")
    parser.add_argument("--seconds", type=float, help="stop after this time (default: until interrupted)")
    parser.add_argument("--rate", type=float, help="ticks of the control loop per second (default: the robot's)")
    parser.add_argument("--priority", type=int, help="real-time priority from 1 to 99 of the control loop")
    blendings = "blending of overlapping chunks: replace, hold, ensemble, rtc (default: replace)"
    parser.add_argument("--chunk-blending", default="replace", help=blendings)
    parser.add_argument("--ood-data", metavar="DATASET", help="dataset for out-of-distribution action checks")
    responses = "response to out-of-distribution actions: hold, slow, refuse (default: hold)"
    parser.add_argument("--ood-action", default="hold", help=responses)
    parser.add_argument("--device", default="cpu", help="device of a checkpoint (default: cpu)")
    parser.add_argument("--lockstep", action="store_true", help="advance simulated time only with commands")
    parser.add_argument("--use-running-sim", action="store_true", help="use a running simulated robot")
    parser.add_argument("--dry-run", action="store_true", help="compute everything, send nothing")
    parser.add_argument("--check", action="store_true", help="run checks without motion; exit code 2 on failure")
    parser.add_argument("--record", type=Path, metavar="FILE.mcap", help="record received, sent and filtered messages")
    parser.add_argument("--out", type=Path, help="report file (default: next free runs/deploy/report.json)")
    add_display_option(parser)
    add_overwrite_option(parser)
    dashboard = "show the run on a web page, with an emergency stop (default: 127.0.0.1:8780)"
    parser.add_argument("--browser", nargs="?", const="127.0.0.1:8780", metavar="[HOST:]PORT", help=dashboard)
    parser.add_argument("--no-tui", action="store_true", help="print lines instead of the live table")


def run(args: argparse.Namespace) -> int:
    """Run the deployment; exit code 0 after a normal end, 1 after a safety stop, 2 after a failed check."""
    from robopolicy.errors import UserError
    from robopolicy.sim.gl import check_mujoco_gl

    check_numbers(args, positive=("episodes",), non_negative=("seed",))
    for name in ("rate", "seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be a positive number, got {value:g}.")
    check_mujoco_gl()  # MuJoCo is imported next
    from robopolicy_robots.deployment import deploy

    return deploy(args)
