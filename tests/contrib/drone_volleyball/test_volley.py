"""Tests of volley drills: contract, closed forms of flight and bounce, ball contacts, the scripted juggler."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from robopolicy.contrib.drone_volleyball.court import LANDED, THROTTLE_STEP, VolleyTask, memory_of
from robopolicy.contrib.drone_volleyball.drills import MARK_RADIUS, Bump, Hit, Pass
from robopolicy.contrib.drone_volleyball.flight import Reference, along, bounce, fall_time, paddle_for, smooth, throw
from robopolicy.contrib.drone_volleyball.juggler import GO, HOVER, SWING, Juggler, at_rest, select
from robopolicy.contrib.drone_volleyball.scene import (
    BALL_BOUNCE,
    BALL_RADIUS,
    COURT,
    GRAVITY,
    PADDLE_TOP,
    Airframe,
    build_model,
)
from robopolicy.errors import UserError
from robopolicy.sim.backends.mujoco.backend import MujocoSim
from robopolicy.sim.backends.mujoco.task import BatchState, ResetState
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, get_task, make_sim

DRILLS = {"volley/bump": Bump, "volley/hit": Hit, "volley/pass": Pass}


def placed(drill, *, drone=None, ball, speed=(0.0, 0.0, 0.0), memory=None) -> MujocoSim:
    """One environment whose first drone hovers level at `drone`, with the ball at `ball` at `speed`."""
    task = drill()
    first = task.initial(np.random.default_rng(0))
    for index, anchor in enumerate(task.anchors):
        start = task.model.joint(f"drone{index}_drone").qposadr[0]
        first.qpos[start : start + 7] = [*(anchor if drone is None or index else drone), 1, 0, 0, 0]
    joint = task.model.joint("ball")
    first.qpos[joint.qposadr[0] : joint.qposadr[0] + 3] = ball
    first.qvel[joint.dofadr[0] : joint.dofadr[0] + 3] = speed
    first.memory.update(memory or {})
    task.initial = lambda rng: ResetState(first.qpos, first.qvel, dict(first.memory))  # type: ignore[method-assign]
    sim = MujocoSim(task, 1)
    sim.reset(0)
    return sim


def task_of(sim: MujocoSim) -> VolleyTask:
    """The simulator's task, typed as `VolleyTask`."""
    assert isinstance(sim.task, VolleyTask)
    return sim.task


def opened(name: str, num_envs: int) -> MujocoSim:
    """Environments of a drill after their reset."""
    sim = make_sim(name, SimOptions(num_envs=num_envs, threads=1))
    assert isinstance(sim, MujocoSim)
    sim.reset(0)
    return sim


def hover(sim: MujocoSim) -> torch.Tensor:
    """Actions that apply the hover thrust."""
    task = task_of(sim)
    thrust = task.frame.hover() / task.frame.max_thrust
    return torch.from_numpy(np.tile(2 * thrust - 1, task.drones)).float()[None]


def run_episodes(sim: MujocoSim, expert: Juggler, steps: int = 500):
    """Returns, bumps and successes `(N,)` of one episode each."""
    active = torch.ones(sim.num_envs, dtype=torch.bool)
    total, bumps = torch.zeros(sim.num_envs), torch.zeros(sim.num_envs)
    success = torch.zeros(sim.num_envs, dtype=torch.bool)
    for _ in range(steps):
        step = sim.step(expert(sim, {}), active)
        total += step.reward
        bumps = torch.where(active, step.info["bumps"], bumps)
        success |= step.info["success"]
        active &= ~step.done
        if not active.any():
            break
    return total, bumps, success


@pytest.mark.parametrize("name", DRILLS)
@pytest.mark.parametrize("reward", ["sparse", "shaped"])
def test_drills_satisfy_the_simulator_contract(name: str, reward: str):
    sim = make_sim(name, SimOptions(num_envs=3, threads=1, reward=reward))
    spec = sim.spec.observation["state"]
    assert len(spec.names) == spec.shape[0] == len(set(spec.names))
    assert sim.spec.control_dt == pytest.approx(0.02) and sim.spec.max_episode_steps == 500
    assert check_simulator(sim, lambda n: make_sim(name, SimOptions(num_envs=n, threads=1, reward=reward))) == []


def test_the_scene_has_the_dimensions_of_the_source():
    model = build_model(1)
    np.testing.assert_allclose(COURT, [12, 6])
    net, ball = model.geom("net"), model.geom("ball")
    assert net.pos[2] + net.size[2] == pytest.approx(2.43) and 2 * net.size[1] == 6
    assert ball.size[0] == BALL_RADIUS == 0.1 and model.body("ball").mass[0] == 0.005
    paddle = model.geom("drone0_rim")
    assert paddle.pos[2] + paddle.size[1] == pytest.approx(PADDLE_TOP) and paddle.size[0] == 0.2
    assert Airframe.of(model).max_thrust == pytest.approx(838**2 * 8.54858e-6, rel=1e-4)


def test_hover_thrusts_balance_the_weight_with_zero_torque():
    frame = Airframe.of(build_model(1))
    front, rear = frame.mass * GRAVITY * np.array([0.20, 0.22]) / (2 * 0.42)  # levers of 0.22 m ahead, 0.20 m behind
    np.testing.assert_allclose(frame.hover(), [front, rear, front, rear])
    np.testing.assert_allclose(frame.mixer @ frame.hover(), [1.52 * 9.81, 0, 0, 0], atol=1e-12)


def test_a_hovering_drone_holds_its_position():
    sim = placed(Hit, ball=(3.0, 2.5, 12.0))
    before = task_of(sim).pose(sim.state()).position.copy()
    for _ in range(50):
        sim.step(hover(sim))
    np.testing.assert_allclose(task_of(sim).pose(sim.state()).position, before, atol=1e-4)


def test_throttles_follow_actions_with_the_rotor_lag():
    sim = placed(Bump, ball=(3.0, 0.0, 4.0))
    start = memory_of(sim.state())["throttle"].copy()
    sim.step(torch.ones(1, 4))
    sim.step(torch.ones(1, 4))
    left = (1 - THROTTLE_STEP) ** 2 * (1 - start)
    np.testing.assert_allclose(1 - memory_of(sim.state())["throttle"], left)


@pytest.mark.parametrize("drop", [0.5, 1.0, 2.0])
def test_paddle_bounces_keep_four_fifths_of_the_ball_speed(drop: float):
    """The drone weighs 300 times as much; contact timing within a physics step changes the ratio by up to 0.04."""
    sim = placed(Bump, ball=(3.0, 0.0, 2.0 + PADDLE_TOP + BALL_RADIUS + drop))
    top = 0.0
    for _ in range(60):
        sim.step(hover(sim))
        position, velocity = task_of(sim).ball(sim.state())
        if memory_of(sim.state())["bumps"][0] and not memory_of(sim.state())["touching"][0]:
            top = position[0, 2] + max(velocity[0, 2], 0.0) ** 2 / (2 * GRAVITY)
            break
    share = np.sqrt((top - 2.0 - PADDLE_TOP - BALL_RADIUS) / drop)
    assert abs(share - BALL_BOUNCE) < 0.04


def test_a_flying_ball_conserves_energy():
    sim = placed(Hit, ball=(3.0, 0.0, 3.0), speed=(-2.0, 1.0, 6.0))

    def energy() -> float:
        position, velocity = task_of(sim).ball(sim.state())
        return float(GRAVITY * position[0, 2] + 0.5 * np.square(velocity[0]).sum())

    before = energy()
    for _ in range(40):
        sim.step(hover(sim))
    assert energy() == pytest.approx(before, rel=2e-3)


def test_paddle_for_inverts_bounce():
    rng = np.random.default_rng(0)
    coming, leaving = rng.normal(size=(2, 20, 3)) + np.array([[[0, 0, -5.0]], [[0, 0, 5.0]]])
    normal, speed = paddle_for(coming, leaving)
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1)
    np.testing.assert_allclose(bounce(coming, normal, speed), leaving)


def test_a_throw_reaches_its_apex_and_goal():
    start, goal = np.array([3.0, 0.5, 2.2]), np.array([-4.0, -1.0, 0.1])
    velocity = throw(start, goal, np.array(4.0))
    assert start[2] + velocity[2] ** 2 / (2 * GRAVITY) == pytest.approx(4.0)
    time = fall_time(start[2], velocity[2], goal[2])
    np.testing.assert_allclose(start + velocity * time - [0, 0, 0.5 * GRAVITY * time**2], goal)
    assert fall_time(np.array(1.0), np.array(0.0), np.array(2.0)) == 0  # already below


def test_a_swing_matches_its_start_and_end_references():
    rng = np.random.default_rng(0)
    start, end = (Reference(*rng.normal(size=(4, 2, 1, 3))) for _ in range(2))
    time = np.array([[0.7], [1.3]])
    path = smooth(start, end, time)
    for moment, boundary in ((0 * time, start), (time, end)):
        for value, expected in zip(along(path, time, moment)[:3], boundary, strict=False):
            np.testing.assert_allclose(value, expected, atol=1e-10)
    step = 1e-5  # each output is the derivative of the previous one
    earlier, later = (along(path, time, 0.5 * time + s) for s in (-step, step))
    for order in range(3):
        slope = (later[order] - earlier[order]) / (2 * step)
        np.testing.assert_allclose(slope, along(path, time, 0.5 * time)[order + 1], rtol=1e-4, atol=1e-4)


def test_bump_reward_depends_on_the_height_of_the_previous_flight():
    sim = placed(Bump, ball=(3.0, 0.0, 2.6))
    rewards = [float(sim.step(hover(sim)).reward) for _ in range(20)]
    assert np.flatnonzero(rewards).size == 1 and max(rewards) == pytest.approx(0.2)
    sim = placed(Bump, ball=(3.0, 0.0, 2.6), memory={"bumps": 1.0, "top": 3.6})
    assert max(float(sim.step(hover(sim)).reward) for _ in range(20)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("what", "drill", "ball", "memory"),
    [
        ("a touch of a rotor", Bump, (3.28, 0.17, 2.5), {}),
        ("a second touch within 0.4 s", Bump, (3.0, 0.0, 2.3), {"since": 0.1, "bumps": 1.0}),
        ("a touch out of turn", Pass, (3.0, -1.5, 2.5), {"turn": 1.0}),
        ("a second bump of a hit", Hit, (3.0, 0.0, 2.5), {"bumps": 1.0}),
        ("a landing", Bump, (5.0, 2.0, 0.3), {}),
    ],
)
def test_faults_terminate_the_episode_with_reward_minus_one(what: str, drill, ball, memory):
    sim = placed(drill, ball=ball, memory=memory)
    for _ in range(20):
        step = sim.step(hover(sim))
        if step.done.any():
            break
    assert step.terminated.all() and not step.info["success"].any(), what
    assert float(step.reward) == pytest.approx(-1.0), what


@pytest.mark.parametrize(("miss", "crossed", "success"), [(0.5, 1.0, True), (0.9, 1.0, False), (0.5, 0.0, False)])
def test_a_hit_succeeds_if_the_ball_lands_on_the_mark_after_crossing_the_net(miss, crossed, success):
    sim = placed(Hit, ball=(-3.0, 1.0, LANDED + 0.05), speed=(0, 0, -4.0), memory={"bumps": 1.0, "crossed": crossed})
    start = int(sim.task.model.joint("target_x").qposadr[0])
    sim.engine.states[0, 1 + start : 3 + start] = [-3.0 + miss, 1.0]
    step = sim.step(hover(sim))
    assert step.terminated.all() and bool(step.info["success"]) == success == bool(step.reward == 1)
    assert float(step.info["miss"]) == pytest.approx(miss, abs=1e-4) and MARK_RADIUS == 0.75


def test_a_ball_below_the_net_is_a_fault():
    sim = placed(Hit, ball=(0.3, 0.0, 2.4), speed=(-5.0, 0.0, 0.0), memory={"bumps": 1.0})
    steps = [sim.step(hover(sim)) for _ in range(8)]
    assert any(bool(step.terminated) and float(step.reward) == -1 for step in steps)


def test_selector_never_interrupts_an_unfinished_swing():
    flags = (False, True)
    for skill, turn, near, over in itertools.product((HOVER, GO, SWING), flags, flags, flags):
        chosen = select(np.array([[skill]]), *(np.array([[flag]]) for flag in (turn, near, over))).item()
        if skill == SWING and not over:
            assert chosen == SWING
        else:
            assert chosen == (HOVER if not turn else SWING if near else GO)


@pytest.mark.parametrize("name", ["volley/bump", "volley/pass"])
def test_swings_run_to_their_end_in_rollouts(name: str):
    sim, expert, checked = opened(name, 4), Juggler(), 0
    action = expert(sim, {})
    for _ in range(120):
        before = expert.skill.copy(), expert.swings.began.copy(), expert.swings.lasts.copy()
        fresh = sim.step(action).done.numpy()[:, None]
        action = expert(sim, {})
        over = sim.state().time[:, None] > before[1] + before[2]
        unfinished = (before[0] == SWING) & ~over & ~fresh
        assert (expert.skill[unfinished] == SWING).all()
        np.testing.assert_array_equal(expert.swings.began[unfinished], before[1][unfinished])
        checked += int(unfinished.sum())
    assert checked > 50


def test_scripted_juggler_keeps_the_ball_in_the_air():
    sim = opened("volley/bump", 8)
    total, bumps, success = run_episodes(sim, Juggler())
    assert success.float().mean() >= 0.75 and total.mean() > 5 and bumps.median() >= 7


def test_the_juggler_hits_the_mark():
    sim = opened("volley/hit", 16)
    total, bumps, success = run_episodes(sim, Juggler(), steps=150)
    assert success.float().mean() >= 0.7 and total.mean() > 0.4 and (bumps == 1).all()


def test_two_jugglers_pass_the_ball():
    sim = opened("volley/pass", 8)
    total, bumps, _ = run_episodes(sim, Juggler(), steps=220)
    assert bumps.mean() >= 3 and total.mean() > 1.5


def test_episodes_are_reproducible_by_seed():
    runs = []
    for _ in range(2):
        sim = make_sim("volley/pass", SimOptions(num_envs=2, threads=1))
        sim.reset(5)
        expert = Juggler()
        runs.append([sim.step(expert(sim, {})).obs["state"] for _ in range(40)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_action_change_measures_throttle_changes():
    sim = placed(Bump, ball=(3.0, 0.0, 4.0))
    calm = sim.step(hover(sim)).info["action_change"]
    rough = sim.step(-torch.ones(1, 4)).info["action_change"]
    assert float(calm) == pytest.approx(0, abs=1e-6)
    assert float(rough) == pytest.approx(float((hover(sim) + 1).mean()), rel=1e-5)


@pytest.mark.parametrize("drill", DRILLS.values())
def test_drill_dynamics_are_mirror_symmetric(drill):
    sim, image = (MujocoSim(drill("shaped"), 1) for _ in range(2))
    mirror = sim.spec.mirror
    assert mirror is not None
    first = sim.task.initial(np.random.default_rng(3))
    reflected = reflect(sim.task, first)
    sim.task.initial, image.task.initial = (lambda rng, s=s: s for s in (first, reflected))  # type: ignore
    obs, other = sim.reset(0), image.reset(0)
    torch.testing.assert_close(mirror.mirror_obs(obs), other)
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        action = 0.5 + 0.2 * torch.randn(1, sim.spec.action_dim, generator=generator)
        step, seen = sim.step(action), image.step(mirror.action(action))
        torch.testing.assert_close(mirror.mirror_obs(step.final_obs), dict(seen.final_obs), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(step.reward, seen.reward, rtol=1e-3, atol=1e-3)


def reflect(task, first: ResetState) -> ResetState:
    """The start mirrored at y -> -y, which swaps two drones."""
    qpos, qvel, memory = first.qpos.copy(), first.qvel.copy(), dict(first.memory)
    names = [f"drone{i}_drone" for i in range(task.drones)] + ["ball"]
    for name, other in zip(names, [*names[:-1][::-1], "ball"], strict=True):
        to, origin = task.model.joint(name), task.model.joint(other)
        place, speed = (start + np.arange(7 - k) for k, start in enumerate((to.qposadr[0], to.dofadr[0])))
        source, rate = (start + np.arange(7 - k) for k, start in enumerate((origin.qposadr[0], origin.dofadr[0])))
        qpos[place] = first.qpos[source] * [1, -1, 1, 1, -1, 1, -1]
        qvel[speed] = first.qvel[rate] * [1, -1, 1, -1, 1, -1]
    if task.has_target:
        at = task.model.joint("target_y").qposadr[0]
        qpos[at] = -qpos[at]
    memory["throttle"] = np.asarray(first.memory["throttle"])[::-1][:, [2, 3, 0, 1]]
    memory["turn"] = (task.drones - 1.0) if task.drones > 1 else 0.0
    return ResetState(qpos, qvel, memory)


def test_skills_can_be_replaced_and_unknown_ones_are_refused():
    sim = placed(Bump, ball=(3.0, 0.0, 4.0))
    asked = []

    def lazy(moment):
        asked.append(moment)
        return at_rest(moment.pose.position)

    Juggler(skills={"go": lazy})(sim, {})
    assert isinstance(asked[0].state, BatchState)
    with pytest.raises(UserError, match="skills hover, go, swing, got serve"):
        Juggler(skills={"serve": lazy})
    with pytest.raises(UserError, match="needs a volley task"):
        get_task("volley/bump").require_expert()()(make_sim("toy/point_mass"), {})


def test_drills_render_images():
    frame = make_sim("volley/pass", SimOptions(num_envs=1))
    frame.reset(0)
    picture = frame.render(width=160, height=120)
    assert picture.shape == (1, 3, 120, 160) and picture.float().std() > 10
