"""A simulated robot in a process of its own: MuJoCo in real time behind the topics of the real one.

    python -m real_robot.sim_node --robot sim_panda --task manipulation/lift --transport dds

Beside the topics of the robot it has three of its own: `/sim/reset` (a `Reset` as JSON text) starts an episode,
`/sim/episode` (JSON, latched) says how it stands, and `/sim/fault` (text) makes the robot fail on purpose:

    exit              end the process at once
    freeze SECONDS    do nothing at all, as a process that is stopped
    mute SECONDS      live on and obey, but publish nothing
    nan SECONDS       report joint positions that are not numbers

With `--lockstep` time passes only when a command arrives, one period for each, so that an episode does not depend on how
fast anybody computes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from real_robot.message import Message
from real_robot.messages import Float64MultiArray, Header, Image, JointState, JointTrajectory, String, Time
from real_robot.sim_robot import SimulatedRobot
from real_robot.transports.base import COMMAND, IMAGE, LATCHED, SENSOR, Publisher, Transport
from real_robot.wiring import JOINTS
from robopolicy.errors import UserError

RESET, EPISODE, FAULT = "/sim/reset", "/sim/episode", "/sim/fault"
FAULTS = ("exit", "freeze", "mute", "nan")
STATUS_PERIOD = 0.05  # [s]
LOCKSTEP_ORIGIN = 1.0  # [s] stamp of simulated time 0 in lockstep; a stamp of 0 would mean "not given"
_LATE = 5  # periods behind which the robot gives up catching up: its time then passes slower


@dataclass(frozen=True)
class Reset:
    """Start an episode."""

    seed: int
    request: int  # a number of the asker's; asking again with the same one changes nothing

    def message(self) -> String:
        """As sent on `/sim/reset`."""
        return String(json.dumps(asdict(self)))


@dataclass(frozen=True)
class Status:
    """How the episode stands, as said on `/sim/episode`."""

    seed: int = 0
    request: int = -1  # of the reset that started it
    steps: int = 0  # control steps since the first command
    success: bool = False
    done: bool = False
    holding: bool = False  # the robot has heard nothing for longer than its time-out
    refused: int = 0  # commands that were none of this robot
    late: int = 0  # times that it could not keep up with real time

    @classmethod
    def read(cls, message: String) -> Status:
        """From the message.

        Raises:
            UserError: It is none.
        """
        try:
            return cls(**json.loads(message.data))
        except (TypeError, ValueError) as error:
            raise UserError(f"Expected the status of an episode on {EPISODE}, found {message.data[:60]!r}.") from error


class SimNode:
    """Connects a simulated robot to topics.

    Args:
        robot: The robot.
        transport: How it is reached.
        topics: Where each source is published `{source: topic}`; sources without a topic are not.
        command: Topic of the joint targets.
        kind: Their type: JointTrajectory (its last point counts), JointState, or Float64MultiArray in the order of
            `robot.wiring.commanded`.
        cameras: Cameras that are rendered and published, `{camera: topic}`.
        image_size: Their height and width [pixels].
        camera_period: Seconds between two pictures.
        lockstep: Whether time waits for commands.
    """

    def __init__(
        self,
        robot: SimulatedRobot,
        transport: Transport,
        topics: Mapping[str, str],
        command: str,
        kind: type[Message] = JointTrajectory,
        *,
        cameras: Mapping[str, str] | None = None,
        image_size: int = 64,
        camera_period: float = 0.05,
        lockstep: bool = False,
    ) -> None:
        self.robot, self.lockstep, self.status = robot, lockstep, Status()
        sources = robot.messages(Time())
        self._sources = {
            key: transport.advertise(topic, type(sources[key]), SENSOR)
            for key, topic in topics.items()
            if key in sources
        }
        self._cameras = {camera: transport.advertise(topic, Image, IMAGE) for camera, topic in (cameras or {}).items()}
        self._image_size, self._camera_period, self._pictured = image_size, camera_period, -np.inf
        self._episode: Publisher[String] = transport.advertise(EPISODE, String, LATCHED)
        self._command = transport.subscribe(command, kind, COMMAND)
        self._reset = transport.subscribe(RESET, String, COMMAND)
        self._fault = transport.subscribe(FAULT, String, COMMAND)
        self._taken = dict.fromkeys((self._command, self._reset, self._fault), 0)  # sequence of the newest message used
        self._until = dict.fromkeys(("mute", "nan"), 0.0)  # [s] monotonic, when a fault ends
        self._told, self._announced = -np.inf, Status()

    def run(self) -> None:
        """Run until the process is told to stop."""
        due = time.monotonic()
        while True:
            self.tick()
            due += self.robot.period
            rest = due - time.monotonic()
            if rest < -_LATE * self.robot.period:
                due = time.monotonic()
                self.status = replace(self.status, late=self.status.late + 1)
            time.sleep(max(rest, 0.0))

    def tick(self) -> None:
        """One period: obey, let time pass, report."""
        self._fail()
        self._start_episode()
        commanded = self._obey()
        if commanded or not self.lockstep:
            self.robot.advance()
        self._report()

    def serve(self) -> None:
        """In lockstep: answer commands as they come until the process is told to stop."""
        reported = -np.inf
        while True:
            self._fail()
            started, commanded = self._start_episode(), self._obey()
            if commanded:
                self.robot.advance()
            if commanded or started or time.monotonic() - reported > STATUS_PERIOD:
                self._report()
                reported = time.monotonic()
            else:
                time.sleep(1e-4)

    def _new(self, subscription: Any) -> Any:
        """The newest message of a subscription, once."""
        received = subscription.latest()
        if received is None or received.sequence == self._taken[subscription]:
            return None
        self._taken[subscription] = received.sequence
        return received.message

    def _start_episode(self) -> bool:
        message = self._new(self._reset)
        if message is None:
            return False
        try:
            reset = Reset(**json.loads(message.data))
            if reset.request == self.status.request:
                return False
            self.robot.reset(reset.seed)
        except (TypeError, ValueError, UserError):
            self.status = replace(self.status, refused=self.status.refused + 1)
            return False
        self._new(self._command)  # one of the last episode is none of this
        self.status = replace(self.status, request=reset.request)
        return True

    def _obey(self) -> bool:
        message = self._new(self._command)
        if message is None:
            return False
        try:
            self.robot.command(*targets_of(message, self.robot.wiring.commanded))
        except UserError:
            self.status = replace(self.status, refused=self.status.refused + 1)
            return False
        return True

    def _report(self) -> None:
        now = time.monotonic()
        episode = self.robot.episode
        self.status = replace(
            self.status,
            seed=episode.seed,
            steps=episode.steps,
            success=episode.success,
            done=episode.done,
            holding=self.robot.holding,
        )
        if now < self._until["mute"]:
            return
        stamp = Time.from_seconds(LOCKSTEP_ORIGIN + self.robot.time if self.lockstep else time.time())
        messages = self.robot.messages(stamp)
        if now < self._until["nan"]:
            joints = messages[JOINTS]
            assert isinstance(joints, JointState)
            messages[JOINTS] = replace(joints, position=np.full(len(joints.name), np.nan))
        # The status goes first: whoever has seen a state knows how the episode stood in it.
        if self.status != self._announced or now - self._told >= STATUS_PERIOD:
            self._episode.publish(String(json.dumps(asdict(self.status))))
            self._told, self._announced = now, self.status
        if self.robot.time - self._pictured >= self._camera_period - 1e-9 or self.robot.time < self._pictured:
            self._pictured = self.robot.time
            for camera, publisher in self._cameras.items():
                pixels = self.robot.picture(camera, self._image_size, self._image_size)
                publisher.publish(Image.from_pixels(pixels, Header(stamp, camera)))
        for key in sorted(self._sources, key=lambda key: key == JOINTS):  # joints last: they say that all is there
            self._sources[key].publish(messages[key])

    def _fail(self) -> None:
        message = self._new(self._fault)
        if message is None:
            return
        kind, _, seconds = message.data.partition(" ")
        try:
            duration = float(seconds or 0.0)
        except ValueError:
            return
        if kind == "exit":
            os._exit(1)
        if kind == "freeze":
            time.sleep(duration)
        elif kind in self._until:
            self._until[kind] = time.monotonic() + duration


def targets_of(message: Message, order: tuple[str, ...]) -> tuple[tuple[str, ...], np.ndarray]:
    """Joints and their targets in a command; `order` is that of the joints where it names none.

    Raises:
        UserError: It holds no positions.
    """
    if isinstance(message, JointTrajectory) and message.points:
        return message.joint_names, message.points[-1].positions
    if isinstance(message, JointState):
        return message.name, message.position
    if isinstance(message, Float64MultiArray) and len(message.data) == len(order):
        return order, message.data
    raise UserError(f"A command of type {message.ros_name} without a position for every joint.")
