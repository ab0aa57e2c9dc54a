"""A test rig: a control loop on a fake clock, a robot in the same process that follows commands, and faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.spec import PolicySpec
from robopolicy_robots.loop import ControlLoop, LoopOptions
from robopolicy_robots.messages import Bool, Header, Image, JointState, JointTrajectory, Time
from robopolicy_robots.policy_runner import InferenceResult, infer
from robopolicy_robots.robot import Camera, Joint, RobotSpec, SafetyConfig, Topic
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports import loopback
from robopolicy_robots.transports.base import COMMAND, IMAGE, LATCHED, SENSOR, Received
from robopolicy_robots.transports.faults import Faults, FaultTransport
from robopolicy_robots.transports.loopback import LoopbackTransport

EPOCH = 1.7e9
DT = 0.02  # [s] period of the loop and of the robot's messages
HORIZON = 25  # actions of DT
VELOCITY, ACCELERATION = 2.0, 20.0
Policy = Callable[[float], Any]  # time of the observation -> chunk


def robot_spec(**changes: Any) -> RobotSpec:
    joints = tuple(Joint(name, VELOCITY, -1.5, 1.5, ACCELERATION) for name in ("a", "b", "c"))
    fields: dict[str, Any] = {
        "joints": joints,
        "state": Topic("/joint_states", "sensor_msgs/msg/JointState"),
        "command": Topic("/arm/joint_trajectory", "trajectory_msgs/msg/JointTrajectory", "command"),
        "cameras": (Camera("front", "/front", 2, 2),),
        "safety": SafetyConfig(max_initial_error=2.0),
    }
    return RobotSpec("rig", **(fields | changes))


def wave(time: float) -> NDArray[np.float64]:
    """Return the reference joint positions `(3,)` at `time`."""
    return 0.4 * (1.0 - np.cos(1.5 * time)) * np.array([1.0, -1.0, 0.5])


def follow_wave(observed: float) -> NDArray[np.float64]:
    return np.stack([wave(observed + k * DT) for k in range(HORIZON)])


class Embodiment:
    """An embodiment with joint positions and an image as input and joint positions as output."""

    def __init__(self, *sources: str) -> None:
        self.sources = dict.fromkeys(("joints", *sources), JointState)
        self.joints = ("c", "a", "b")  # not the order of the robot
        self.control_dt = DT
        self.starts = 0

    def start(self, state: Mapping[str, Received]) -> None:
        self.starts += 1

    def observe(self, state: Mapping[str, Received]) -> dict[str, NDArray[Any]]:
        message: Any = state["joints"].message
        place = dict(zip(message.name, message.position, strict=True))
        return {"state": np.array([place[name] for name in "abc"])}

    def command(self, action: NDArray[Any], state: Mapping[str, Received]) -> NDArray[Any]:
        return action[[2, 0, 1]]


class ClockedRunner:
    """A runner that answers after `latency` seconds of the fake clock, and never if the policy returns None."""

    takes_prefix = False

    def __init__(self, rig: Rig, latency: float) -> None:
        self.spec = PolicySpec({"state": (3,)}, action_dim=3, horizon=HORIZON, action_horizon=8)
        self.rig, self.latency, self.closed = rig, latency, False
        self._pending: tuple[float, InferenceResult] | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None

    def chunk(self, obs: Mapping[str, NDArray[Any]], prefix: NDArray[Any] | None = None) -> Any:
        return self.rig.policy(self.rig.now)

    def request(self, obs: Any, observed: float, prefix: Any = None) -> bool:
        assert obs["state"].shape == (1, 3)
        answer = infer(self, obs, observed, prefix)
        hangs = answer.detail.startswith("expected") and "object" in answer.detail
        self._pending = (np.inf if hangs else self.rig.now + self.latency, answer)
        return True

    def poll(self) -> InferenceResult | None:
        if self._pending is None or self.rig.now < self._pending[0] - 1e-9:
            return None
        (_, answer), self._pending = self._pending, None
        return answer

    def close(self) -> None:
        self.closed = True


class RobotSide:
    """The robot: publishes its position and moves to the commanded position."""

    def __init__(self, domain: int, spec: RobotSpec) -> None:
        self.transport = LoopbackTransport(domain)
        self._state = self.transport.advertise("/joint_states", JointState, SENSOR)
        self._camera = self.transport.advertise("/front", Image, IMAGE)
        self._commands = self.transport.subscribe("/arm/joint_trajectory", JointTrajectory, COMMAND)
        self.names = list(spec.names)
        self.position = np.zeros(len(spec.joints))
        self.skew = 0.0  # [s] offset of its clock
        self.silent = self.blind = self.stuck = False
        self.stamp: float | None = None  # frozen stamp
        self.sent = 0

    def say(self, now: float) -> None:
        stamp = Time.from_seconds(EPOCH + now + self.skew if self.stamp is None else self.stamp)
        if not self.silent:
            order = ["abc".index(name) for name in self.names]
            self._state.publish(JointState(Header(stamp), tuple(self.names), self.position[order]))
        if not self.blind:
            self._camera.publish(Image.from_pixels(np.zeros((2, 2, 3), np.uint8), Header(stamp)))

    def obey(self) -> None:
        received = self._commands.latest()
        if received is not None and received.sequence > self.sent:
            self.sent = received.sequence
            (point,) = received.message.points
            assert received.message.joint_names == ("a", "b", "c")
            if not self.stuck:
                self.position = point.positions.copy()


class Rig:
    """The whole rig; `until` advances the clock."""

    _domains = iter(range(1000, 10_000))

    def __init__(
        self,
        monkeypatch: Any,
        policy: Policy = follow_wave,
        latency: float = 0.04,
        sources: tuple[str, ...] = (),
        options: LoopOptions | None = None,
        faults: Faults | None = None,
        **changes: Any,
    ) -> None:
        self.now = 100.0
        monkeypatch.setattr(loopback, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.spec, self.policy, self.domain = robot_spec(**changes), policy, next(self._domains)
        self.robot = RobotSide(self.domain, self.spec)
        self.operator = LoopbackTransport(self.domain).advertise("/estop", Bool, LATCHED)
        self.runner = ClockedRunner(self, latency)
        self.embodiment = Embodiment(*sources)
        transport = FaultTransport(LoopbackTransport(self.domain), faults or Faults(), clock=lambda: self.now)
        self.loop = ControlLoop(self.spec, transport, self.embodiment, self.runner, options)
        self.ticks: list[Tick] = []

    def until(self, seconds: float) -> Tick:
        """Run for another `seconds` and return the last tick."""
        for _ in range(round(seconds / DT)):
            self.now += DT
            self.robot.say(self.now)
            self.ticks.append(self.loop.tick(self.now))
            self.robot.obey()
        return self.ticks[-1]

    def running(self, seconds: float = 0.5) -> Rig:
        """Arm the loop and run it into the state RUN."""
        self.loop.arm()
        assert self.until(seconds).state is State.RUN, self.loop.reason
        return self

    def after(self, start: float, state: State) -> float:
        """Return the seconds from `start` to the first tick in `state`."""
        return next(tick.now for tick in self.ticks if tick.now > start and tick.state is state) - start

    def check_limits(self) -> None:
        """Assert that every command is finite and within position, velocity and acceleration limits."""
        path = np.array([tick.command for tick in self.ticks if tick.command is not None])
        velocity = np.diff(path, axis=0) / DT
        assert np.isfinite(path).all() and np.abs(path).max() <= 1.5
        assert np.abs(velocity).max() <= VELOCITY * (1 + 1e-6)
        assert np.abs(np.diff(velocity, axis=0)).max() / DT <= ACCELERATION * (1 + 1e-6)

    def at_rest(self) -> bool:
        """Return whether the last two commands are equal."""
        last, before = self.ticks[-1].command, self.ticks[-2].command
        return last is not None and before is not None and bool((last == before).all())
