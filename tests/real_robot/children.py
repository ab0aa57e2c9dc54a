"""Processes for tests to kill, a bridge and a policy server: `python children.py bridge DOMAIN | server PORT`."""

import itertools
import sys
import time
from typing import Any

import numpy as np
from scripted import NAMES

from robopolicy.deploy.contract import ChunkPolicy
from robopolicy.spec import PolicySpec
from robopolicy_robots.loop import ControlLoop, LoopOptions
from robopolicy_robots.policy_runner import PolicyRunner
from robopolicy_robots.robot import RobotSpec, load_robot
from robopolicy_robots.states import State, Tick
from robopolicy_robots.task_embodiment import TaskEmbodiment
from robopolicy_robots.transports.base import Transport, open_transport
from robopolicy_tasks.manipulation.lift import Lift


class Sway:
    """A policy that moves the tool back and forth, 0.4 s per direction, and answers after `latency` seconds."""

    spec, takes_prefix = PolicySpec({"state": (len(NAMES),)}, action_dim=5, horizon=8, action_horizon=4), False

    def __init__(self, latency: float = 0.0) -> None:
        self.latency, self._asked = latency, itertools.count()

    def chunk(self, obs: Any, prefix: Any = None) -> np.ndarray:
        time.sleep(self.latency)
        chunk = np.zeros((8, 5), np.float32)
        chunk[:, 1] = 0.3 if next(self._asked) % 4 < 2 else -0.3
        chunk[:, 4] = -1.0
        return chunk

    def close(self) -> None:
        pass


def bridge(transport: Transport, source: ChunkPolicy, robot: RobotSpec | None = None, **parts: Any) -> ControlLoop:
    """Return a control loop for the simulated Panda."""
    robot = robot or load_robot("sim_panda")
    return ControlLoop(robot, transport, TaskEmbodiment(Lift(), "panda_"), PolicyRunner(source), LoopOptions(**parts))


def _ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


def main(role: str, where: str) -> None:
    """Run until killed; print one line on standard output when ready."""
    if role == "server":
        from robopolicy.deploy.batching import ServedChunkPolicy
        from robopolicy.deploy.server import ServerConfig, running

        with running(ServedChunkPolicy(Sway()), ServerConfig(port=int(where))):
            _ready()
            time.sleep(120.0)
        return
    reported: list[bool] = []

    def report(tick: Tick) -> None:
        if tick.state is State.RUN and not reported:
            reported.append(True)
            _ready()

    loop = bridge(open_transport("dds", domain=int(where)), Sway(), on_tick=report)
    loop.arm()
    loop.run(120.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
