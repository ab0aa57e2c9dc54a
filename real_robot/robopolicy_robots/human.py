"""Person who moves a robot in `deploy`, alone or taking over from a policy."""

from __future__ import annotations

import argparse
from contextlib import ExitStack, closing

from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.sim.backends.mujoco.task import MujocoTask
from robopolicy.teleop.chunk_policy import HumanChunkPolicy
from robopolicy.teleop.devices import open_device
from robopolicy.teleop.operator import HumanOperator
from robopolicy_robots.policy_source import PolicyRequirements, open_source


def open_human(
    args: argparse.Namespace, task: MujocoTask, requirements: PolicyRequirements, stack: ExitStack
) -> HumanChunkPolicy:
    """Open the device of `--teleop`, the policy of `--policy` and the dataset of `--demonstrations`, if any.

    Raises:
        UserError: One of them cannot be opened.
    """
    base = None if args.policy is None else stack.enter_context(closing(open_source(args.policy, args.device)))
    sink = None
    if args.demonstrations is not None:
        names = {key: entry.names for key, entry in task.observation.items()}
        names["action"] = names["policy_action"] = task.action_names
        options = {"names": names, "overwrite": args.overwrite}
        sink = stack.enter_context(LeRobotWriter(args.demonstrations, control_dt=requirements.control_dt, **options))
    low, high = requirements.low, requirements.high
    device = stack.enter_context(closing(open_device(args.teleop)))
    operator = HumanOperator(device, low, high, requirements.control_dt, task.action_names)
    return HumanChunkPolicy(operator, requirements.task, requirements.observation, base=base, sink=sink)
