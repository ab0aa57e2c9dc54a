"""Tests of FaultTransport: the effect of each fault, and repeatability for one seed."""

from itertools import pairwise

import numpy as np
import pytest

from robopolicy_robots.messages import Header, JointState, JointTrajectory, JointTrajectoryPoint, String, Time
from robopolicy_robots.transports.base import SENSOR, Received
from robopolicy_robots.transports.faults import Faults, FaultTransport
from robopolicy_robots.transports.loopback import LoopbackTransport

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")


class Clock:
    """A clock that changes only when set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(faults: Faults, count: int = 200, seed: int = 0) -> tuple[list[Received[JointState] | None], int]:
    """Return two polls of a subscription for each of `count` messages, and the number of malformed messages."""
    clock, seen = Clock(), []
    with LoopbackTransport() as robot, FaultTransport(LoopbackTransport(), faults, seed, clock) as bridge:
        publisher = robot.advertise("/joint_states", JointState, SENSOR)
        subscription = bridge.subscribe("/joint_states", JointState, SENSOR)
        assert subscription.publishers == publisher.matched == 1
        for number in range(1, count + 1):
            publisher.publish(JointState(Header(Time(number)), ("a", "b"), np.full(2, number), np.full(2, number)))
            for _ in range(2):
                seen.append(subscription.latest())
                clock.now += 0.005
        return seen, bridge.graph().endpoints[0].malformed


def stamps(seen: list[Received[JointState] | None]) -> list[float | None]:
    return [None if each is None else each.stamp for each in seen]


def test_without_faults_all_arrive() -> None:
    seen, malformed = run(Faults())
    assert stamps(seen)[::2] == stamps(seen)[1::2] == list(range(1, 201)) and not malformed


@pytest.mark.parametrize("faults", [Faults(drop=0.3, reorder=0.2, corrupt=0.5, nan=0.2, jitter=0.03, duplicate=0.1)])
def test_a_seed_repeats_a_run(faults: Faults) -> None:
    def content(seed: int) -> list[JointState | None]:
        return [each and each.message for each in run(faults, seed=seed)[0]]

    assert content(1) == content(1) != content(2)


def test_drop_loses_a_share_of_the_messages() -> None:
    seen, _ = run(Faults(drop=0.3))
    assert 40 <= sum(one is other for one, other in pairwise(seen[::2])) <= 80
    assert run(Faults(drop=1.0))[0] == [None] * 400


def test_delay_shifts_messages_in_time() -> None:
    seen, _ = run(Faults(delay=0.035))
    found = stamps(seen[::2])
    assert found[:4] == [None] * 4 and found[4:] == list(range(1, 197))
    assert seen[-2].received == pytest.approx(100 + 1.95 + 0.035)  # type: ignore[union-attr]


def test_reorder_and_jitter_deliver_older_messages_later() -> None:
    for faults in (Faults(reorder=0.3), Faults(jitter=0.05)):
        found = [stamp for stamp in stamps(run(faults)[0]) if stamp]
        assert any(later < earlier for earlier, later in pairwise(found))


def test_duplicates_are_sent_twice() -> None:
    with LoopbackTransport() as robot, FaultTransport(LoopbackTransport(), Faults(duplicate=1.0)) as bridge:
        subscription = robot.subscribe("/status", String, SENSOR)
        taken = []
        subscription.store = lambda message, publisher: taken.append(message)  # type: ignore[attr-defined]
        bridge.advertise("/status", String, SENSOR).publish(String("x"))
        assert taken == [String("x")] * 2


def test_corruption_is_counted_or_seen() -> None:
    seen, malformed = run(Faults(corrupt=1.0))
    wrong = [each for each in seen if each and each.message.position.tolist() != [each.stamp] * 2]
    assert malformed > 10 and wrong


def test_nan_replaces_one_number() -> None:
    seen, _ = run(Faults(nan=1.0), 20)
    for each in seen:
        message = each.message  # type: ignore[union-attr]
        assert np.isnan(np.concatenate([message.position, message.velocity])).sum() == 1
    with LoopbackTransport() as robot, FaultTransport(LoopbackTransport(), Faults(nan=1.0)) as bridge:
        subscription = robot.subscribe("/command", JointTrajectory, SENSOR)
        point = JointTrajectoryPoint(np.zeros(3))
        bridge.advertise("/command", JointTrajectory, SENSOR).publish(JointTrajectory(points=(point,)))
        assert np.isnan(subscription.latest().message.points[0].positions).sum() == 1  # type: ignore[union-attr]


def test_frozen_content_arrives_repeatedly() -> None:
    seen, _ = run(Faults(freeze=True))
    assert set(stamps(seen)) == {1.0}
    assert [each.sequence for each in seen[::2] if each] == list(range(1, 201))


def test_faults_can_change_at_run_time_and_affect_only_their_topics() -> None:
    with LoopbackTransport() as robot, FaultTransport(LoopbackTransport(), Faults(drop=1, topics=("/a",))) as bridge:
        publishers = [robot.advertise(topic, String, SENSOR) for topic in ("/a", "/b")]
        lossy, sound = (bridge.subscribe(topic, String, SENSOR) for topic in ("/a", "/b"))
        for publisher in publishers:
            publisher.publish(String("1"))
        assert lossy.latest() is None and sound.latest() is not None
        bridge.faults = Faults()
        publishers[0].publish(String("2"))
        assert lossy.latest().message == String("2")  # type: ignore[union-attr]
