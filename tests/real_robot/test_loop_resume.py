"""Tests of resuming the control loop after a hold or a stop: no jumps, and never without an operator."""

from collections.abc import Callable

import numpy as np
import pytest
from rig import DT, VELOCITY, Rig, follow_wave

from robopolicy_robots.messages import Bool
from robopolicy_robots.robot import Joint, SafetyConfig
from robopolicy_robots.states import State
from robopolicy_robots.transports.base import SENSOR
from robopolicy_robots.transports.loopback import LoopbackTransport

SLUGGISH = 2.0  # [rad/s^2]: about half a second to stop


def held(rig: Rig) -> None:
    rig.loop.deactivate()


def stopped(rig: Rig) -> None:
    rig.loop.estop.press("keyboard")


@pytest.mark.parametrize("halt", [held, stopped])
def test_arming_while_braking_waits_for_the_stop_to_end(
    monkeypatch: pytest.MonkeyPatch, halt: Callable[[Rig], None]
) -> None:
    joints = tuple(Joint(name, VELOCITY, -1.5, 1.5, SLUGGISH) for name in "abc")
    rig = Rig(monkeypatch, latency=0.0, joints=joints).running(1.3)
    halt(rig)
    rig.until(DT)
    if rig.loop.estop:
        rig.loop.reset_estop()
    rig.loop.arm()
    assert rig.until(DT).reason == "the last stop has not ended"
    assert rig.until(1.0).state is State.RUN
    path = np.array([tick.command for tick in rig.ticks if tick.command is not None])
    assert np.abs(np.diff(path, n=2, axis=0)).max() <= SLUGGISH * DT**2 * (1 + 1e-6)


def test_a_fault_after_a_silence_resumes_from_the_measured_position(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch).running(1.0)
    rig.robot.silent = True
    rig.until(0.5)
    rig.robot.silent, rig.robot.stuck = False, True
    rig.robot.position = rig.robot.position + 0.05  # moved by hand
    rig.policy = lambda observed: follow_wave(observed) * np.nan
    assert rig.until(0.2).reason.startswith("non-finite action")
    rig.policy, start = follow_wave, rig.now
    rig.until(0.3)
    first = next(tick for tick in rig.ticks if tick.now > start and tick.state is State.RUN)
    assert first.command is not None
    assert np.abs(first.command - rig.robot.position).max() <= 20.0 * DT**2 * (1 + 1e-6)


def test_a_controlled_robot_resumes_from_the_held_position(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch).running(1.0)
    rig.policy = lambda observed: follow_wave(observed) * np.nan
    rig.until(1.0)
    held_at = rig.ticks[-1].command
    rig.robot.stuck, rig.robot.position = True, rig.robot.position - 0.05  # it sags under its load
    rig.policy, start = follow_wave, rig.now
    rig.until(0.5)
    first = next(tick for tick in rig.ticks if tick.now > start and tick.state is State.RUN)
    assert first.command is not None and held_at is not None
    assert np.abs(first.command - held_at).max() <= 20.0 * DT**2 * (1 + 1e-6)


def test_a_short_press_of_the_button_stops_the_robot(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.operator.publish(Bool(True))
    rig.operator.publish(Bool(False))
    rig.running(0.5)  # a press and release before the motion has no effect
    rig.operator.publish(Bool(True))
    rig.operator.publish(Bool(False))
    tick = rig.until(0.5)
    assert tick.state is State.ESTOP and tick.reason == "/estop" and rig.at_rest()
    rig.loop.reset_estop()
    rig.running(0.5)


def test_arming_waits_for_the_operator_heartbeat_also_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, safety=SafetyConfig(max_initial_error=2.0, heartbeat_timeout=0.5))
    operator = LoopbackTransport(rig.domain).advertise("/operator/heartbeat", Bool, SENSOR)
    rig.loop.arm()
    operator.publish(Bool(False))  # a button that is let go
    assert rig.until(0.5).reason == "no operator on /operator/heartbeat"
    operator.publish(Bool(True))
    assert rig.until(0.3).state is State.RUN
    assert rig.until(0.6).reason.startswith("no heartbeat for 0.5") and rig.loop.state is State.ESTOP
    rig.loop.reset_estop()
    rig.loop.arm()
    assert rig.until(0.5).reason == "no operator on /operator/heartbeat"
    operator.publish(Bool(True))
    assert rig.until(0.3).state is State.RUN
