"""How the control loop sets off again after it was held or stopped: never in a jump, never unattended."""

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
def test_a_robot_that_is_armed_while_it_brakes_comes_to_rest_first(
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


def test_what_goes_wrong_after_a_silence_does_not_hide_where_the_robot_is(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_robot_under_control_goes_on_from_where_it_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_button_that_is_let_go_at_once_has_been_pressed_nonetheless(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.operator.publish(Bool(True))
    rig.operator.publish(Bool(False))
    rig.running(0.5)  # what was said while nothing moved is over
    rig.operator.publish(Bool(True))
    rig.operator.publish(Bool(False))
    tick = rig.until(0.5)
    assert tick.state is State.ESTOP and tick.reason == "/estop" and rig.at_rest()
    rig.loop.reset_estop()
    rig.running(0.5)


def test_an_operator_who_has_to_be_heard_of_is_waited_for_also_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, safety=SafetyConfig(max_initial_error=2.0, heartbeat_timeout=0.5))
    operator = LoopbackTransport(rig.domain).advertise("/operator/heartbeat", Bool, SENSOR)
    rig.loop.arm()
    assert rig.until(0.5).reason == "no operator on /operator/heartbeat"
    operator.publish(Bool(True))
    assert rig.until(0.3).state is State.RUN
    assert rig.until(0.6).reason.startswith("no heartbeat for 0.5") and rig.loop.state is State.ESTOP
    rig.loop.reset_estop()
    rig.loop.arm()
    assert rig.until(0.5).reason == "no operator on /operator/heartbeat"
    operator.publish(Bool(True))
    assert rig.until(0.3).state is State.RUN
