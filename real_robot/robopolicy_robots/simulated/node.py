"""Process of a simulated robot: MuJoCo in real time behind the topics of the real robot.

    python -m robopolicy_robots.simulated.node --robot sim_panda --task manipulation/lift --transport dds

See `robopolicy_robots.simulated.topics` for the topics of episodes and faults. With `--lockstep`, each command advances
the time by one period, so that an episode does not depend on the speed of computation.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np

from robopolicy.constraints import check_count
from robopolicy.errors import UserError
from robopolicy.shutdown import stop_signals
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import MujocoTask
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy_robots.codecs.definitions import message_type
from robopolicy_robots.commands import targets_of
from robopolicy_robots.connection import add_options, connect
from robopolicy_robots.message import Message
from robopolicy_robots.messages import CompressedImage, Header, Image, JointState, JointTrajectory, String, Time
from robopolicy_robots.mujoco_topics import prefix_of
from robopolicy_robots.robot import JOINTS, load_robot
from robopolicy_robots.simulated.client import NODE
from robopolicy_robots.simulated.robot import SensorNoise, SimulatedRobot
from robopolicy_robots.simulated.topics import EPISODE, FAULT, LOCKSTEP_ORIGIN, READY, RESET, Reset, Status
from robopolicy_robots.transports.base import COMMAND, IMAGE, LATCHED, SENSOR, Publisher, Transport
from robopolicy_robots.transports.faults import Faults, FaultTransport

STATUS_PERIOD = 0.05  # [s]
_POLL = 1e-4  # [s] polling interval for a command in lockstep
_LATE = 5  # periods of delay after which the robot slows down instead of catching up


class SimNode:
    """Connection of a simulated robot to topics.

    Args:
        robot: The robot.
        transport: Connection of the robot.
        topics: Topic of each published source `{source: topic}`.
        command: Topic of the joint targets.
        kind: Type of the targets: JointTrajectory (the last point is used), JointState, or Float64MultiArray in the
            order of `robot.topics.commanded`.
        cameras: Cameras that are rendered and published, `{camera: topic}`.
        compressed: Cameras with PNG files instead of pixels.
        image_size: Height and width of images [pixels].
        camera_period: Time between two images [s].
        lockstep: Advance time only with commands.
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
        compressed: Collection[str] = (),
        image_size: int = 64,
        camera_period: float = 0.05,
        lockstep: bool = False,
    ) -> None:
        self.robot, self.lockstep, self.status = robot, lockstep, Status()
        self._transport = transport
        sources = robot.messages(Time())
        topics = {key: topic for key, topic in topics.items() if key in sources}
        self._sources = {key: transport.advertise(topic, type(sources[key]), SENSOR) for key, topic in topics.items()}
        self._cameras = {
            camera: transport.advertise(topic, CompressedImage if camera in compressed else Image, IMAGE)
            for camera, topic in (cameras or {}).items()
        }
        self._image_size, self._camera_period, self._last_images = image_size, camera_period, -np.inf
        self._episode: Publisher[String] = transport.advertise(EPISODE, String, LATCHED)
        self._command = transport.subscribe(command, kind, COMMAND)
        self._reset = transport.subscribe(RESET, String, COMMAND)
        self._fault = transport.subscribe(FAULT, String, COMMAND)
        self._sequences = dict.fromkeys((self._command, self._reset, self._fault), 0)  # of the last used messages
        self._until = dict.fromkeys(("mute", "nan"), 0.0)  # [s, monotonic] end of a fault
        self._status_sent, self._last_status = -np.inf, Status()

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Run until `stopped`, in real time, or in lockstep as fast as commands arrive."""
        while self.lockstep and not stopped():
            if not self.tick():
                time.sleep(_POLL)
        due = time.monotonic()
        while not stopped():
            self.tick()
            due += self.robot.period
            rest = due - time.monotonic()
            if rest < -_LATE * self.robot.period:
                due = time.monotonic()
                self.status = replace(self.status, late=self.status.late + 1)
            time.sleep(max(rest, 0.0))

    def tick(self) -> bool:
        """Run one period: read a command, step, publish; return False in lockstep without a command."""
        self._inject_fault()
        started, commanded = self._start_episode(), self._apply_command()
        if commanded or not self.lockstep:
            self.robot.advance()
        if started or commanded or not self.lockstep or time.monotonic() - self._status_sent >= STATUS_PERIOD:
            self._publish()
        return started or commanded

    def close(self) -> None:
        """Close the transport and the robot."""
        self._transport.close()
        self.robot.close()

    def _newest(self, subscription: Any) -> Any:
        """Newest message of a subscription, or None if it was used before."""
        received = subscription.latest()
        if received is None or received.sequence == self._sequences[subscription]:
            return None
        self._sequences[subscription] = received.sequence
        return received.message

    def _start_episode(self) -> bool:
        message = self._newest(self._reset)
        if message is None:
            return False
        try:
            reset = Reset.read(message)
            if reset.request == self.status.request:
                return False
            self.robot.reset(reset.seed)
        except UserError:
            self.status = replace(self.status, refused=self.status.refused + 1)
            return False
        self._newest(self._command)  # discard a command of the last episode
        self.status = replace(self.status, request=reset.request)
        return True

    def _apply_command(self) -> bool:
        message = self._newest(self._command)
        if message is None:
            return False
        try:
            self.robot.command(*targets_of(message, self.robot.topics.commanded))
        except UserError:
            self.status = replace(self.status, refused=self.status.refused + 1)
            return False
        return True

    def _publish(self) -> None:
        now = time.monotonic()
        self.status = replace(self.status, **vars(self.robot.episode), holding=self.robot.holding, time=self.robot.time)
        if now < self._until["mute"]:
            return
        stamp = Time.from_seconds(LOCKSTEP_ORIGIN + self.robot.time if self.lockstep else time.time())
        messages = self.robot.messages(stamp)
        if now < self._until["nan"]:
            joints = messages[JOINTS]
            assert isinstance(joints, JointState)
            messages[JOINTS] = replace(joints, position=np.full(len(joints.name), np.nan))
        if self.robot.time - self._last_images >= self._camera_period - 1e-9 or self.robot.time < self._last_images:
            self._last_images = self.robot.time
            for camera, publisher in self._cameras.items():
                pixels = self.robot.render(camera, self._image_size, self._image_size)
                header = Header(stamp, camera)
                compressed = publisher.kind is CompressedImage
                publisher.publish(png(pixels, header) if compressed else Image.from_pixels(pixels, header))
        for key in sorted(self._sources, key=lambda key: key == JOINTS):  # joints last: they complete the sources
            self._sources[key].publish(messages[key])
        # Send the status after the state, so that clients have the initial state when an episode begins.
        if self.lockstep or self.status.changed(self._last_status) or now - self._status_sent >= STATUS_PERIOD:
            self._episode.publish(self.status.message())
            self._status_sent, self._last_status = now, self.status

    def _inject_fault(self) -> None:
        message = self._newest(self._fault)
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


def png(pixels: np.ndarray, header: Header) -> CompressedImage:
    """PNG message of an image `(height, width, 3)` uint8."""
    from PIL import Image as pillow

    file = BytesIO()
    pillow.fromarray(pixels).save(file, "png")
    return CompressedImage(header, "png", np.frombuffer(file.getvalue(), np.uint8))


def task_of(name: str) -> MujocoTask:
    """Create a registered task; raises `UserError` if it does not run on the native MuJoCo backend."""
    entry = get_task(name)
    sim = make_sim(name, SimOptions(num_envs=1, backend="mujoco", threads=1)) if "mujoco" in entry.backends else None
    if not isinstance(sim, MujocoSim):
        raise UserError(f"Task {entry.name} cannot be deployed: it is not a task of this project on native MuJoCo.")
    sim.close()
    return sim.task


def build(args: argparse.Namespace) -> SimNode:
    """Create a node from command-line arguments; raises `UserError` for invalid ones."""
    check_count("--seed", args.seed, 0)
    if not 0 < args.rate < np.inf:
        raise UserError(f"--rate must be a positive number, got {args.rate:g}.")
    robot, task = load_robot(args.robot), task_of(args.task)
    simulated = SimulatedRobot(
        task,
        prefix_of(task.model, robot.names),
        period=1.0 / args.rate,
        timeout=robot.command_timeout or np.inf,
        sensor_noise=SensorNoise(**{name: getattr(args, name) for name in SensorNoise.__dataclass_fields__}),
        seed=args.seed,
    )
    transport = connect(args, robot)
    if args.drop or args.reorder:
        transport = FaultTransport(transport, Faults(drop=args.drop, reorder=args.reorder), args.seed)
    cameras = {camera.name: camera for camera in robot.cameras if camera.name in args.cameras}
    return SimNode(
        simulated,
        transport,
        {key: topic.topic for key, topic in robot.readable_topics.items()},
        robot.command.topic,
        message_type(robot.command.type),
        cameras={name: camera.topic for name, camera in cameras.items()},
        compressed=[name for name, camera in cameras.items() if camera.type == CompressedImage.ros_name],
        image_size=max((camera.height for camera in cameras.values()), default=0),
        camera_period=0.0 if args.lockstep else 0.05,  # in lockstep all sensors report the same time
        lockstep=args.lockstep,
    )


def node_parser() -> argparse.ArgumentParser:
    """Create the argument parser of the process."""
    parser = argparse.ArgumentParser(f"python -m {NODE}", description="Simulate a robot with its topics.")
    parser.add_argument("--robot", default="sim_panda", help="shipped robot or YAML file (default: sim_panda)")
    parser.add_argument("--task", default="manipulation/lift", help="MuJoCo task (default: manipulation/lift)")
    add_options(parser)
    parser.add_argument("--rate", type=float, default=100.0, help="states per second (default: 100)")
    parser.add_argument("--lockstep", action="store_true", help="advance time only with commands, by 1 / rate each")
    parser.add_argument("--attached", action="store_true", help="stop when the standard input ends, with the parent")
    parser.add_argument("--cameras", nargs="*", default=[], help="cameras to publish")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and faults (default: 0)")
    for name, unit in (
        ("delay", "s from a command to the motors"),
        ("encoder_step", "rad or m, resolution of joint positions"),
        ("position_noise", "rad or m, of joint positions"),
        ("velocity_noise", "rad/s or m/s, of joint velocities"),
        ("pose_noise", "m, of object positions"),
        ("drop", "probability that a message is lost"),
        ("reorder", "probability that a message arrives after the next one"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=0.0, help=f"{unit} (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the node; exit code 0 after a stop signal, 2 for invalid arguments."""
    args = node_parser().parse_args(argv)
    stopped: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda number, _: stopped.append(number))
    if args.attached:
        threading.Thread(target=lambda: (sys.stdin.read(), stopped.append(0)), daemon=True).start()
    try:
        node = build(args)
    except UserError as error:
        sys.stderr.write(f"simulated robot: error: {error}\n")
        return 2
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    try:
        node.run(lambda: bool(stopped))
    finally:
        node.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
