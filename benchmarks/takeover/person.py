"""A scripted person at a gamepad: a virtual joystick of SDL, moved in real time as the expert of lift would act."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import numpy as np

from benchmarks.virtual_gamepad import VirtualGamepad
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, get_task, register
from robopolicy.sim.wrappers.base import unwrapped
from robopolicy.teleop.contract import TeleopCommand
from robopolicy.teleop.devices import DEVICES
from robopolicy.teleop.gamepad import GamepadTeleop

LIFT = get_task("manipulation/lift")
TASK = "person/lift_cube"  # the same task, whose simulator the scripted person sees
PATIENCE = 25  # steps without success after which the person takes over; the expert lifts the cube within 20


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


def _make(options: SimOptions) -> VectorSim:
    """Build the simulator and show it to the person."""
    sim = LIFT.make(options)
    ScriptedPerson.sims.append(sim)
    return sim


def register_person() -> None:
    """Register the task `person/lift_cube` and the device `person`."""
    register(replace(LIFT, name=TASK, make=_make))
    DEVICES.register("person", ScriptedPerson)
