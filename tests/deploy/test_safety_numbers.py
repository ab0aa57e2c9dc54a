"""Tests of the safety filter with hand-computed numbers: margins, lead, modes, and the measured position."""

import numpy as np
import pytest

from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.motion import Bounds, JointLimits, JointMotion, braking_path, safe_stop

DT = 0.02  # [s]
NOTHING = np.full(1, np.nan)


def joint(**changes: float) -> JointLimits:
    """One joint from -1 to 3 rad, at most 2 rad/s and 10 rad/s^2."""
    fields = {"position_low": -1.0, "position_high": 3.0, "velocity": 2.0, "acceleration": 10.0, "jerk": np.inf}
    fields |= {"effort": np.inf} | changes
    return JointLimits(("a",), **{name: np.full(1, value) for name, value in fields.items()})


def at(position: float) -> JointMeasurement:
    return JointMeasurement(0.0, np.full(1, position), NOTHING, NOTHING)


def settled(safety: SafetyFilter, command: float, start: float = 0.0, measured: float = np.nan) -> float:
    """Final position of a joint with the command `command` for 5 s."""
    state = FilterState.at_rest(np.full(1, start))
    for _ in range(250):
        sent, state, _ = safety.step(np.full(1, command), state, at(measured), DT)
    return float(sent[0])


def test_margin_is_a_share_of_the_range_at_both_ends() -> None:
    assert settled(SafetyFilter(joint()), 9.0) == pytest.approx(3.0 - 0.002 * 4.0, abs=1e-9)  # the default
    safety = SafetyFilter(joint(), FilterConfig(margin=0.1))
    assert settled(safety, 9.0) == pytest.approx(2.6, abs=1e-9)
    assert settled(safety, -9.0) == pytest.approx(-0.6, abs=1e-9)


def test_command_leads_a_stuck_robot_by_full_speed_times_the_lead() -> None:
    assert settled(SafetyFilter(joint()), 2.5, measured=0.0) == pytest.approx(2.0 * 0.25, abs=1e-9)  # the default
    for step in (np.inf, 0.001):  # the lead depends on the joint's speed limit, not on max_step
        safety = SafetyFilter(joint(), FilterConfig(max_lead=0.1, max_step=step))
        assert settled(safety, 2.5, measured=0.0) == pytest.approx(2.0 * 0.1, abs=1e-9)


def test_measured_position_outside_the_limits_does_not_pull_commands_there() -> None:
    assert settled(SafetyFilter(joint()), 0.0, start=2.9, measured=4.0) == pytest.approx(3.0 - 0.002 * 4.0, abs=1e-9)


def test_delta_is_added_to_the_last_command() -> None:
    safety = SafetyFilter(joint(), FilterConfig(mode="delta"))
    sent, state, done = safety.step(np.full(1, 0.003), FilterState.at_rest(np.full(1, 0.5)), at(np.nan), DT)
    assert sent[0] == pytest.approx(0.503, abs=1e-15) and not done
    sent, state, done = safety.step(np.full(1, 0.005), state, at(np.nan), DT)
    assert sent[0] == pytest.approx(0.508, abs=1e-15) and not done


def test_velocities_brake_for_the_limit_at_the_measured_position() -> None:
    safety, dt = SafetyFilter(joint(), FilterConfig(mode="velocity", margin=0.0)), DT
    state, position = FilterState.at_rest(np.zeros(1)), 0.0
    for _ in range(200):
        sent, state, _ = safety.step(np.full(1, 9.0), state, at(position), dt)
        position += 1.2 * float(sent[0]) * dt  # the joint moves faster than commanded
    assert position <= 3.0 + 1e-9 and position == pytest.approx(3.0, abs=0.1)


def test_velocities_are_integrated_without_a_measured_position() -> None:
    safety = SafetyFilter(joint(), FilterConfig(mode="velocity", margin=0.0))
    state, position = FilterState.at_rest(np.zeros(1)), 0.0
    for _ in range(200):
        sent, state, _ = safety.step(np.full(1, 9.0), state, at(np.nan), DT)
        position += float(sent[0]) * DT
    assert position == pytest.approx(3.0, abs=1e-6)


def test_stop_starts_with_the_current_acceleration() -> None:
    limits = joint(jerk=500.0)  # 10 rad/s^2 change per period
    path = safe_stop(np.zeros(1), np.full(1, 1.0), np.full(1, 10.0), limits, DT)
    # From +10 to 0, then -10 rad/s^2: the first period keeps 1 rad/s, each later one loses 0.2 rad/s.
    np.testing.assert_allclose(path[:3, 0], [0.02, 0.02 + 0.016, 0.02 + 0.016 + 0.012], atol=1e-12)
    first = braking_path(JointMotion(np.zeros(1), np.full(1, 0.02), np.full(1, 10.0 * DT**2)), Bounds.of(limits, DT))[0]
    assert path[0, 0] == first.position[0]
