"""Tests of the safety filter: for any input, the output is finite and within all limits at once."""

import numpy as np
import pytest

from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter, Workspace
from robopolicy.deploy.safety.motion import Bounds, JointLimits, JointMotion, braking_path, safe_stop, stop_bounds
from robopolicy.errors import UserError

INF, NAN = np.inf, np.nan
JOINTS = 6
UNKNOWN = JointMeasurement(0.0, np.full(JOINTS, NAN), np.full(JOINTS, NAN), np.full(JOINTS, NAN))


def plain_limits(**changes) -> JointLimits:
    fields = {"position_low": -1.0, "position_high": 1.0, "velocity": 2.0, "acceleration": 10.0, "jerk": 500.0}
    fields |= {"effort": INF} | changes
    return JointLimits(tuple("abcdef"), **{name: np.full(JOINTS, value) for name, value in fields.items()})


def random_limits(rng: np.random.Generator) -> JointLimits:
    low = rng.uniform(-3, 0, JOINTS)
    high = low + 10 ** rng.uniform(-2, 1, JOINTS)
    acceleration, jerk = 10 ** rng.uniform(-1, 3, JOINTS), 10 ** rng.uniform(0, 4, JOINTS)
    acceleration[rng.random(JOINTS) < 0.2] = INF
    jerk[rng.random(JOINTS) < 0.2] = INF
    low[rng.random(JOINTS) < 0.1] = -INF
    velocity = 10 ** rng.uniform(-1, 1, JOINTS)
    return JointLimits(tuple("abcdef"), low, high, velocity, acceleration, jerk, np.full(JOINTS, INF))


def start_within(limits: JointLimits, rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(np.maximum(limits.position_low, -3.0), limits.position_high)


def check_within(path: np.ndarray, limits: JointLimits, dt: float) -> None:
    """Check that positions `(N, J)` from rest keep every limit, up to the rounding of differences."""
    path = np.concatenate([np.repeat(path[:1], 3, axis=0), path])
    velocity = np.diff(path, axis=0) / dt
    acceleration = np.diff(velocity, axis=0) / dt
    jerk = np.diff(acceleration, axis=0) / dt
    rounding = 1e-15 * max(1.0, np.abs(path).max())
    assert np.isfinite(path).all()
    assert (path >= limits.position_low).all() and (path <= limits.position_high).all()
    assert (np.abs(velocity) <= limits.velocity * (1 + 1e-6) + 2 * rounding / dt).all()
    assert (np.abs(acceleration) <= limits.acceleration * (1 + 1e-6) + 4 * rounding / dt**2).all()
    assert (np.abs(jerk) <= limits.jerk * (1 + 1e-6) + 8 * rounding / dt**3).all()


def adversary(kind: str, tick: int, state: FilterState, limits: JointLimits, dt: float, rng: np.random.Generator):
    at, speed = state.motion.position, state.motion.velocity
    if kind == "noise":
        return rng.uniform(-4, 4, JOINTS)
    if kind == "bang-bang":
        return np.full(JOINTS, 10.0) * (-1) ** (tick // 25)
    if kind == "as fast as allowed":
        return at + rng.choice([-1, 1], JOINTS) * limits.velocity * dt
    if kind == "faster and faster":  # always just feasible, into the limit
        return at + np.maximum(speed, 0) + np.minimum(limits.acceleration, 2 * limits.velocity / dt) * dt**2
    if kind == "at the limit":
        return limits.position_high if tick % 40 < 20 else limits.position_low
    return rng.choice(
        np.array([NAN, INF, -INF, 1e300, -1e300, 1e308, 5e-324, 0.0, -1.0]), JOINTS if rng.random() < 0.9 else 3
    )


KINDS = ("noise", "bang-bang", "as fast as allowed", "faster and faster", "at the limit", "garbage")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["absolute", "delta"])
def test_every_output_is_within_all_limits_at_once(kind: str, mode: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(4):
        limits, dt = random_limits(rng), 10 ** rng.uniform(-2.5, -1)
        safety = SafetyFilter(limits, FilterConfig(mode=mode, margin=0.0))
        state = FilterState.at_rest(start_within(limits, rng))
        path = [state.motion.position]
        for tick in range(100):
            command = adversary(kind, tick, state, limits, dt, rng)
            if mode == "delta" and len(command) == JOINTS:
                command = command - np.where(np.isfinite(command), state.motion.position, 0.0)
            sent, state, _ = safety.step(command, state, UNKNOWN, dt)
            path.append(sent)
        check_within(np.array(path), limits, dt)


def test_velocities_are_bounded_and_stop_before_the_limit() -> None:
    rng = np.random.default_rng(0)
    limits, dt = plain_limits(), 0.01
    safety = SafetyFilter(limits, FilterConfig(mode="velocity", margin=0.0))
    state, position, sent = FilterState.at_rest(np.zeros(JOINTS)), np.zeros(JOINTS), []
    for tick in range(600):
        command = rng.uniform(-9, 9, JOINTS) if tick < 300 else np.full(JOINTS, 1e300)
        velocity, state, _ = safety.step(command, state, UNKNOWN._replace(position=position), dt)
        position = position + velocity * dt
        sent.append(velocity)
        assert (np.abs(position) <= 1.0 + 1e-9).all()
    velocity = np.array(sent)
    assert np.abs(velocity).max() <= 2.0 + 1e-9
    assert np.abs(np.diff(velocity, axis=0)).max() / dt <= 10.0 + 1e-6
    assert np.abs(np.diff(velocity, n=2, axis=0)).max() / dt**2 <= 500.0 + 1e-4
    np.testing.assert_allclose(position, 1.0, atol=1e-3)  # the position still reaches the limit


def test_feasible_commands_pass_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    for dt in (0.002, 0.02, 0.05):
        limits = plain_limits()
        amplitude, rate = rng.uniform(0.1, 0.3, JOINTS), rng.uniform(0.5, 1.5, JOINTS)
        safety, state = SafetyFilter(limits), FilterState.at_rest(np.zeros(JOINTS))
        for tick in range(400):
            wanted = amplitude * (1.0 - np.cos(rate * tick * dt))
            sent, state, done = safety.step(wanted, state, UNKNOWN, dt)
            assert not done
            np.testing.assert_array_equal(sent, wanted)


@pytest.mark.parametrize("dt", [0.005, 0.02, 0.05])
def test_jump_is_followed_as_fast_as_allowed_with_little_overshoot(dt: float) -> None:
    limits = plain_limits()
    safety, state = SafetyFilter(limits), FilterState.at_rest(np.zeros(JOINTS))
    goal = np.array([0.9, -0.9, 0.5, -0.1, 0.01, 0.0])
    path = [np.zeros(JOINTS)]
    for _ in range(int(3.0 / dt)):
        sent, state, _ = safety.step(goal, state, UNKNOWN, dt)
        path.append(sent)
    check_within(np.array(path), limits, dt)
    np.testing.assert_allclose(path[-1], goal, atol=1e-12)
    assert (np.array(path) * np.sign(goal) <= np.abs(goal) + 1e-3).all()
    arrived = dt * np.argmax(np.abs(path - goal)[:, 0] < 1e-3)
    assert arrived < 1.25 * (0.9 / 2.0 + 2.0 / 10.0 + 10.0 / 500.0) + dt  # distance / v + v / a + a / j


def test_jumps_leave_the_filter_tracking_a_moving_target() -> None:
    limits, dt = plain_limits(), 0.02
    safety, state = SafetyFilter(limits), FilterState.at_rest(np.zeros(JOINTS))
    done = ()
    for tick in range(200):
        wanted = 0.5 * np.sin(1.5 * tick * dt) + np.zeros(JOINTS) + (0.4 if 50 <= tick < 60 else 0.0)
        sent, state, done = safety.step(wanted, state, UNKNOWN, dt)
    assert not done
    np.testing.assert_array_equal(sent, wanted)


def test_invalid_commands_stop_the_motion() -> None:
    limits, dt = plain_limits(), 0.02
    safety, state = SafetyFilter(limits), FilterState.at_rest(np.zeros(JOINTS))
    for _ in range(20):
        _, state, _ = safety.step(np.ones(JOINTS), state, UNKNOWN, dt)
    assert np.abs(state.motion.velocity).max() > 0
    bad = [None, "wave", [1, 2], np.zeros((JOINTS, 1)), [10**400] * JOINTS, {}, [1j] * JOINTS, np.full(JOINTS, NAN)]
    for command in bad * 4:
        sent, state, done = safety.step(command, state, UNKNOWN, dt)
        assert [row.kind for row in done] in (["shape"], ["finite"]) and np.isfinite(sent).all()
    assert state.motion.at_rest


def test_interventions_name_check_joint_value_and_limit() -> None:
    limits, dt = plain_limits(), 0.02
    safety, state = SafetyFilter(limits, FilterConfig(margin=0.0)), FilterState.at_rest(np.zeros(JOINTS))
    command = np.array([5.0, 0.5, 0.03, 0.0, 0.0, 0.0])
    _, _, done = safety.step(command, state, UNKNOWN._replace(time=7.0), dt)
    rows = [(row.kind, row.joint, round(row.value, 6), round(row.limit, 6), row.time) for row in done]
    assert rows == [
        ("position", "a", 5.0, 1.0, 7.0),
        ("velocity", "a", 50.0, 2.0, 7.0),
        ("velocity", "b", 25.0, 2.0, 7.0),
        ("acceleration", "c", 75.0, 10.0, 7.0),
    ]
    assert str(done[0]) == "position of a: 5, allowed 1"


def test_commands_do_not_run_away_from_a_stuck_robot() -> None:
    limits, dt = plain_limits(), 0.02
    safety, state = SafetyFilter(limits, FilterConfig(max_lead=0.1)), FilterState.at_rest(np.zeros(JOINTS))
    stuck = UNKNOWN._replace(position=np.zeros(JOINTS))
    for _ in range(100):
        sent, state, done = safety.step(np.full(JOINTS, 0.9), state, stuck, dt)
    assert np.abs(sent).max() <= 0.2 + 1e-9 and {row.kind for row in done} == {"lead"}


def test_too_much_effort_stops_the_motion() -> None:
    limits, dt = plain_limits(effort=20.0), 0.02
    safety, state = SafetyFilter(limits), FilterState.at_rest(np.zeros(JOINTS))
    for tick in range(60):
        strained = UNKNOWN._replace(effort=np.array([0, 0, -30.0 * (tick > 20), NAN, 0, 0]))
        sent, state, done = safety.step(np.full(JOINTS, 0.9), state, strained, dt)
    assert state.motion.at_rest and (sent < 0.9).all()
    assert [(row.kind, row.joint, row.value, row.limit) for row in done] == [("effort", "c", -30.0, 20.0)]


def test_steps_are_bounded() -> None:
    safety = SafetyFilter(plain_limits(), FilterConfig(max_step=0.001))
    state, path = FilterState.at_rest(np.zeros(JOINTS)), [np.zeros(JOINTS)]
    for _ in range(50):
        sent, state, _ = safety.step(np.full(JOINTS, 0.9), state, UNKNOWN, 0.02)
        path.append(sent)
    assert np.abs(np.diff(path, axis=0)).max() <= 0.001 * (1 + 1e-9)


def test_positions_stay_in_the_workspace() -> None:
    limits, dt = plain_limits(), 0.02
    box = Workspace(lambda q: np.cumsum(q, axis=-1)[:, None, :3], (-0.5, -0.5, -INF), (0.5, 0.5, INF))
    safety, state = SafetyFilter(limits, workspace=box), FilterState.at_rest(np.zeros(JOINTS))
    rng, path, kinds = np.random.default_rng(1), [np.zeros(JOINTS)], set()
    for _ in range(300):
        sent, state, done = safety.step(rng.uniform(-1, 1, JOINTS), state, UNKNOWN, dt)
        path.append(sent)
        kinds |= {row.kind for row in done}
    points = np.cumsum(path, axis=-1)[:, :2]
    assert np.abs(points).max() <= 0.5 + 1e-6 and np.abs(points).max() > 0.4 and "workspace" in kinds
    check_within(np.array(path), limits, dt)


def test_start_outside_the_limits_only_moves_back_inside() -> None:
    limits, dt = plain_limits(), 0.02
    safety, state = SafetyFilter(limits), FilterState.at_rest(np.full(JOINTS, 1.05))
    path = []
    for tick in range(200):
        sent, state, _ = safety.step(np.full(JOINTS, 3.0 if tick < 50 else 0.0), state, UNKNOWN, dt)
        path.append(sent)
    assert np.max(path) <= 1.05 and np.max(path[49]) < 1.0
    np.testing.assert_allclose(path[-1], 0.0, atol=1e-12)


def test_the_filter_is_a_function_of_its_arguments() -> None:
    safety, state = SafetyFilter(plain_limits()), FilterState.at_rest(np.zeros(JOINTS))
    first = safety.step(np.ones(JOINTS), state, UNKNOWN, 0.02)
    safety.step(-np.ones(JOINTS), state, UNKNOWN, 0.02)
    again = safety.step(np.ones(JOINTS), state, UNKNOWN, 0.02)
    np.testing.assert_array_equal(first[0], again[0])
    assert first[2] == again[2]
    first[0][:] = 9.0  # the returned array is a copy
    assert (first[1].motion.position < 1.0).all()


def test_braking_path_ends_at_rest_and_continues_its_own_plan() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = 10 ** rng.uniform(-3, 0, JOINTS)
        bend = np.minimum(size * 10 ** rng.uniform(-2, 0.5, JOINTS), 2 * size)
        limits = plain_limits(velocity=size, acceleration=bend, jerk=bend * 10 ** rng.uniform(-1.5, 0.5, JOINTS))
        bounds = Bounds.of(limits, 1.0)
        start = JointMotion(np.zeros(JOINTS), rng.uniform(-size, size), rng.uniform(-bend, bend))
        path = braking_path(start, bounds)
        assert path[-1].at_rest
        bends = np.stack([start.acceleration, *(motion.acceleration for motion in path)])
        assert (np.abs(bends) <= bounds.acceleration * (1 + 1e-12)).all()
        assert (np.abs(np.diff(bends, axis=0)) <= bounds.jerk * (1 + 1e-9)).all()
        for here, there in zip(braking_path(path[0], bounds), path[1:], strict=True):
            np.testing.assert_array_equal(here.position, there.position)


@pytest.mark.parametrize("seed", range(4))
def test_the_closed_form_bounds_every_stop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = tuple(f"j{i}" for i in range(2000))
    ones = np.ones(len(names))
    acceleration = 10 ** rng.uniform(-2.5, 0.3, len(names))
    jerk = acceleration * 10 ** rng.uniform(-2, 0.3, len(names))
    bounds = Bounds.of(JointLimits(names, -ones, ones, ones, acceleration, jerk, ones), 1.0)
    velocity = rng.uniform(-1, 1, len(names)) * 10 ** rng.uniform(-4, 0, len(names))
    bend = rng.choice([-1.0, 0.0, 1.0], len(names)) * np.where(rng.random(len(names)) < 0.5, 1, rng.random(len(names)))
    start = JointMotion(np.zeros(len(names)), velocity, bend * bounds.acceleration)
    reached = stop_bounds(start, bounds)
    path = [start, *braking_path(start, bounds)]
    positions = np.stack([motion.position for motion in path])
    assert (positions.min(0) >= reached.low - 1e-9).all() and (positions.max(0) <= reached.high + 1e-9).all()
    speeds = np.abs(np.stack([motion.velocity for motion in path])).max(0)
    assert (speeds <= reached.speed + 1e-9).all()


@pytest.mark.parametrize("jerk", [20.0, 5000.0, INF])
def test_the_work_of_a_tick_is_bounded_at_a_high_rate(jerk: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop from full speed takes thousands of periods, which used to be computed one after the other."""

    def forbidden(*_: object) -> None:
        raise AssertionError("a stop was computed period by period")

    monkeypatch.setattr("robopolicy.deploy.safety.filter.braking_path", forbidden)
    limits, dt, rng = plain_limits(jerk=jerk), 0.0005, np.random.default_rng(0)
    safety, start = SafetyFilter(limits, FilterConfig(max_lead=10.0)), np.zeros(JOINTS)
    state, path = FilterState.at_rest(start), [start]
    for tick in range(6000):
        command = rng.uniform(-3, 3, JOINTS) if tick % 2 else np.full(JOINTS, 3.0 if tick % 4000 < 2000 else -3.0)
        output, state, _ = safety.step(command, state, UNKNOWN, dt)
        path.append(output)
    check_within(np.stack(path), limits, dt)
    assert np.abs(np.stack(path)).max() > 0.9  # the range is used


@pytest.mark.parametrize("field", ["position", "velocity", "effort"])
@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinite_measurement_stops_the_robot(field: str, value: float) -> None:
    safety, state = SafetyFilter(plain_limits()), FilterState.at_rest(np.zeros(JOINTS))
    for _ in range(20):
        _, state, _ = safety.step(np.full(JOINTS, 0.5), state, UNKNOWN, 0.02)
    broken = np.full(JOINTS, np.nan)
    broken[2] = value
    measured = UNKNOWN._replace(**{field: broken})
    for _ in range(60):
        output, state, done = safety.step(np.full(JOINTS, 0.9), state, measured, 0.02)
        assert [note.kind for note in done] == ["measurement"]
    assert state.motion.at_rest and (output < 0.9).all()


def test_braking_time_and_distance_match_the_textbook() -> None:
    limits, dt = plain_limits(velocity=3.0, jerk=INF), 0.001
    path = safe_stop(np.zeros(JOINTS), np.full(JOINTS, 2.0), np.zeros(JOINTS), limits, dt)
    assert len(path) * dt == pytest.approx(2.0 / 10.0, abs=2 * dt)  # v / a
    np.testing.assert_allclose(path[-1], 2.0**2 / (2 * 10.0), rtol=0.01)  # v^2 / 2 a
    limits = plain_limits(velocity=3.0)
    path = safe_stop(np.zeros(JOINTS), np.full(JOINTS, 2.0), np.zeros(JOINTS), limits, dt)
    assert len(path) * dt == pytest.approx(2.0 / 10.0 + 10.0 / 500.0, abs=3 * dt)  # v / a + a / j
    np.testing.assert_allclose(path[-1], 2.0**2 / (2 * 10.0) + 2.0 * 10.0 / (2 * 500.0), rtol=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"velocity": INF}, "joint 'a': 'velocity' must be known, got inf"),
        ({"acceleration": 0.0}, "joint 'a': 'acceleration' must be a positive number, got 0"),
        ({"jerk": NAN}, "'jerk' must be a positive number, got nan"),
        ({"position_high": NAN}, "joint 'a': 'position_high' must be a number, got nan"),
        ({"position_low": 2.0}, "'position_low' must be below 'position_high', got 2"),
    ],
)
def test_invalid_limits_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plain_limits(**changes)


KINDS_OF_NUMBERS = ("i1", "u8", "i8", "f2", "f4", ">f8", "g")
OTHERS = (
    *(np.ones(JOINTS, kind) for kind in ("?", "c16", "U1", "S1", "M8[s]", "m8[s]", object, [("a", float)])),
    *(np.ones(shape) for shape in ((), (0,), (JOINTS, 0), (1, JOINTS), (JOINTS + 1,))),
    *("123456", b"123456", iter([1.0] * JOINTS), {0: 1.0}, [[1.0]] * 2, [1.0, [2.0]], object()),
)


def test_only_real_numbers_are_commands() -> None:
    safety, start = SafetyFilter(plain_limits()), FilterState.at_rest(np.zeros(JOINTS))
    wanted, _, _ = safety.step(np.ones(JOINTS), start, UNKNOWN, 0.02)
    for kind in KINDS_OF_NUMBERS:
        sent, _, done = safety.step(np.ones(JOINTS, kind), start, UNKNOWN, 0.02)
        np.testing.assert_array_equal(sent, wanted)
        assert {row.kind for row in done}.isdisjoint({"shape", "finite"})
    for command in OTHERS:
        sent, _, done = safety.step(command, start, UNKNOWN, 0.02)
        assert [row.kind for row in done] == ["shape"] and not sent.any(), command
    for command in (np.ma.masked_all(JOINTS), np.full(JOINTS, np.longdouble("1e4000"))):
        sent, _, done = safety.step(command, start, UNKNOWN, 0.02)
        assert [row.kind for row in done] == ["finite"] and not sent.any()


@pytest.mark.parametrize("mode", ["absolute", "delta", "velocity"])
@pytest.mark.parametrize("dt", [1e-9, 0.02, 1e3])
def test_nothing_overflows_for_any_command_and_measurement(mode: str, dt: float) -> None:
    rng, limits = np.random.default_rng(3), plain_limits(effort=1.0)
    numbers = np.array([NAN, INF, -INF, 1e300, -1.7e308, 5e-324, -1e-310, -0.0, 2.0**63, -1.0])
    safety, state = SafetyFilter(limits, FilterConfig(mode=mode, margin=0.0)), FilterState.at_rest(np.zeros(JOINTS))
    path = [np.zeros(JOINTS)] * 3
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for _ in range(60):
            measured = JointMeasurement(rng.choice(numbers), *(rng.choice(numbers, JOINTS) for _ in range(3)))
            sent, state, done = safety.step(rng.choice(numbers, JOINTS), state, measured, dt)
            assert all(str(row) and "\n" not in str(row) for row in done)
            path.append(sent)
    if mode != "velocity":
        check_within(np.array(path), limits, dt)
        return
    velocity = np.array(path)
    assert np.abs(velocity).max() <= 2.0 + 1e-9
    assert np.abs(np.diff(velocity, axis=0)).max() / dt <= 10.0 * (1 + 1e-6)
    assert np.abs(np.diff(velocity, n=2, axis=0)).max() / dt**2 <= 500.0 * (1 + 1e-6)


@pytest.mark.parametrize("dt", [0.0, -0.02, NAN, INF])
def test_invalid_control_period_is_refused(dt: float) -> None:
    with pytest.raises(UserError, match="control period must be a positive number"):
        SafetyFilter(plain_limits()).step(np.zeros(JOINTS), FilterState.at_rest(np.zeros(JOINTS)), UNKNOWN, dt)
