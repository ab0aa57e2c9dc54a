"""Tests of the inputs of the control loop: joints by name, time order and publishers."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from rig import EPOCH, Rig, robot_spec

from robopolicy.errors import UserError
from robopolicy_robots.messages import Header, JointState, Time
from robopolicy_robots.sensor_inputs import SensorInputs
from robopolicy_robots.transports.base import SENSOR, Publisher
from robopolicy_robots.transports.loopback import LoopbackTransport

_domains = itertools.count(20_000)


@pytest.fixture
def ends() -> Iterator[tuple[SensorInputs, Publisher[JointState]]]:
    domain = next(_domains)
    with LoopbackTransport(domain) as ours, LoopbackTransport(domain) as robot:
        yield SensorInputs(robot_spec(), ours, ()), robot.advertise("/joint_states", JointState, SENSOR)


def state(names: str, stamp: float = EPOCH, **columns: list[float]) -> JointState:
    arrays = {name: np.array(values) for name, values in columns.items()}
    return JointState(Header(Time.from_seconds(stamp)), tuple(names), **arrays)


def test_each_column_is_read_by_the_names_of_the_joints(ends: tuple[SensorInputs, Publisher[JointState]]) -> None:
    inputs, robot = ends
    robot.publish(state("cxab", position=[3, 9, 1, 2], velocity=[0.3, 9, 0.1, 0.2], effort=[30, 9, 10, 20]))
    inputs.poll()
    found = inputs.measured(7.0)
    assert found.time == 7.0 and found.position.tolist() == [1, 2, 3]
    assert found.velocity.tolist() == [0.1, 0.2, 0.3] and found.effort.tolist() == [10, 20, 30]


def test_missing_columns_are_nan(ends: tuple[SensorInputs, Publisher[JointState]]) -> None:
    inputs, robot = ends
    with pytest.raises(UserError, match="no joint state yet"):
        inputs.measured(0.0)
    robot.publish(state("abc", position=[1, 2, 3], velocity=[0.1]))
    inputs.poll()
    found = inputs.measured(0.0)
    assert np.isnan(found.velocity).all() and np.isnan(found.effort).all()


def test_an_out_of_order_message_is_not_used(ends: tuple[SensorInputs, Publisher[JointState]]) -> None:
    inputs, robot = ends
    for stamp, place in ((1.0, 0.1), (1.02, 0.2), (1.01, 0.9)):
        robot.publish(state("abc", EPOCH + stamp, position=[place] * 3))
        inputs.poll()
    assert inputs.measured(0.0).position.tolist() == [0.2] * 3


def test_unlocking_publishers_clears_the_state(ends: tuple[SensorInputs, Publisher[JointState]]) -> None:
    inputs, robot = ends
    robot.publish(state("abc", position=[0, 0, 0]))
    inputs.poll()
    inputs.lock_publishers()
    assert inputs.watchdog.streams["joints"].sequence == 1
    ages = inputs.ages(inputs.state["joints"].received + 0.03)
    assert ages == {"joints": 0.03} and not inputs.stale_source(inputs.state["joints"].received + 0.03)
    inputs.unlock_publishers()
    assert not inputs.state and inputs.stale_source(0.0) == "no fresh 'joints'" and inputs.ages(0.0) == {"joints": None}


def test_exactly_one_publisher_is_required(ends: tuple[SensorInputs, Publisher[JointState]]) -> None:
    inputs, robot = ends
    assert inputs.publisher_error() == ""
    robot.close()
    assert inputs.publisher_error() == "0 publishers of /joint_states"


def test_a_hold_is_recorded_once_and_not_in_every_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch).running()
    rig.robot.silent = True
    rig.until(0.6)
    assert rig.loop.log.counts["stale"] == 1
