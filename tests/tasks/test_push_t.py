"""Tests of PushT: the closed-form pushing model, paths around the block, and gym-pusht under the contract."""

import math

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy_tasks.push_t import planner, tee

BELOW = np.array([[0.0, -45.0 - tee.FINGER]])  # touches the middle of the bar from below, block at angle 0


def at(x: float = 256.0, y: float = 256.0, angle: float = 0.0) -> np.ndarray:
    return np.array([[x, y, angle]])


def test_push_towards_the_centre_of_mass_translates_the_block_by_the_push_length() -> None:
    finger = BELOW + at()[:, :2]
    poses = tee.push(at(), finger, np.array([[0.0, 1.0]]), 40.0, 2.0)
    assert poses.shape == (20, 1, 3)
    np.testing.assert_allclose(poses[-1, 0], [256.0, 296.0, 0.0], atol=1e-9)


def test_push_off_the_centre_of_mass_moves_and_turns_the_block_by_the_lever() -> None:
    """Depth d at lever r: the block moves by j = d / (1 + r^2 / I) and turns by j r / I."""
    lever, depth = 30.0, 0.5
    finger = at()[:, :2] + BELOW + [lever, depth]
    moved = tee.resolve_contact(at(), finger)[0]
    impulse = depth / (1 + lever**2 / tee.INERTIA)
    np.testing.assert_allclose(moved, [256.0, 256.0 + impulse, impulse * lever / tee.INERTIA], atol=1e-12)
    touched = tee.clearance(tee.to_block(finger[:, None], moved[None]))
    assert abs(float(touched[0, 0]) - tee.FINGER) < 0.01  # the contact point moved as far as the finger


def test_model_is_invariant_to_the_block_pose() -> None:
    turn, shift = 0.7, np.array([30.0, -40.0])
    rotation = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    finger = np.array([[25.0, -58.0]])
    here = tee.resolve_contact(at(0, 0), finger)[0]
    there = tee.resolve_contact(np.array([[*shift, turn]]), finger @ rotation.T + shift)[0]
    np.testing.assert_allclose(there, [*(rotation @ here[:2] + shift), here[2] + turn], atol=1e-9)


def test_world_and_block_coordinates_are_inverse_and_the_goal_has_no_error() -> None:
    pose = np.array([[100.0, 200.0, 0.3], [20.0, 10.0, -2.0]])
    points = np.random.default_rng(0).normal(size=(2, 5, 2))
    np.testing.assert_allclose(tee.to_block(tee.to_world(points, pose), pose), points, atol=1e-9)
    assert tee.error(tee.GOAL[None]) == pytest.approx(0.0)
    assert tee.error(tee.GOAL[None] + [[3.0, 4.0, 0.0]]) == pytest.approx(5.0)


def test_pushes_start_clear_of_the_block_and_press_into_it() -> None:
    assert tee.clearance(planner.CONTACTS).max() < 1e-9
    outside = planner.CONTACTS - (tee.FINGER + planner.GAP) * planner.NORMALS
    assert (tee.clearance(outside) > tee.FINGER + 1.0).all()
    assert (tee.clearance(planner.CONTACTS + 4.0 * planner.NORMALS) > 2.9).all()  # inside, not beyond a corner


def test_planned_pushes_bring_the_block_closer() -> None:
    rng = np.random.default_rng(0)
    pose = tee.GOAL + np.array([40.0, -30.0, 0.5])
    error = float(tee.error(pose[None])[0])
    for _ in range(6):
        push = planner.plan(pose, np.array([50.0, 50.0]), rng)
        assert push is not None
        pose = tee.push(pose[None], push.start[None], push.direction[None], push.length, planner.STRIDE)[-1, 0]
    assert float(tee.error(pose[None])[0]) < 0.1 * error


def test_waypoints_lead_around_the_block() -> None:
    pose = np.array([256.0, 256.0, 0.0])
    free = planner.waypoint(np.array([100.0, 100.0]), np.array([400.0, 100.0]), pose)
    assert free is not None and free.tolist() == [400.0, 100.0]
    finger, target = np.array([100.0, 256.0]), np.array([420.0, 256.0])
    for _ in range(20):
        point = planner.waypoint(finger, target, pose)
        assert point is not None
        line = np.linspace(finger, point, 50)
        assert tee.clearance(tee.to_block(line, pose[None])).min() > tee.FINGER
        finger = point
        if (finger == target).all():
            break
    assert finger.tolist() == target.tolist()


def test_every_contact_point_is_reachable() -> None:
    """This includes the points between bar and stem, which no corner of the hull sees past the other corners."""
    starts = tee.to_world(planner.CONTACTS - (tee.FINGER + planner.GAP) * planner.NORMALS, at(angle=0.4))[0]
    assert all(planner.waypoint(np.array([60.0, 60.0]), start, at(angle=0.4)[0]) is not None for start in starts)


def test_push_cost_includes_the_path_to_it_and_to_later_pushes() -> None:
    """From this pose, the planner once repeatedly preferred a useless push nearby to a good one on the other side."""
    pose, finger = np.array([211.0, 357.0, 1.41]), np.array([198.0, 317.0])
    push = planner.plan(pose, finger, np.random.default_rng(0))
    assert push is not None
    after = tee.push(pose[None], push.start[None], push.direction[None], push.length, planner.STRIDE)[-1]
    assert np.abs(after[0, :2] - pose[:2]).max() > 10 or abs(after[0, 2] - pose[2]) > 0.2


@pytest.fixture
def gym_pusht() -> None:
    pytest.importorskip("gym_pusht")


@pytest.mark.usefixtures("gym_pusht")
def test_push_t_satisfies_the_contract_and_observes_the_block() -> None:
    options = {"cameras": ("top",), "image_size": 32}
    sim = make_sim("push_t", SimOptions(num_envs=2, **options))
    shapes = {key: entry.shape for key, entry in sim.spec.observation.items()}
    assert shapes == {"agent": (2,), "keypoints": (16,), "image.top": (3, 32, 32)}
    assert (sim.spec.control_dt, sim.spec.max_episode_steps) == (0.1, 300)
    sim.spec.__dict__["max_episode_steps"] = 20  # long enough to see an episode end
    assert check_simulator(sim, lambda n: make_sim("push_t", SimOptions(num_envs=n, **options))) == []


@pytest.mark.usefixtures("gym_pusht")
def test_near_starts_close_to_the_goal_and_clear_of_the_finger() -> None:
    sim = make_sim("push_t/near", SimOptions(num_envs=2))
    assert sim.spec.max_episode_steps == 150
    offsets = []
    for seed in range(0, 20, 2):
        sim.reset(seed)
        for env in sim.envs:  # type: ignore[attr-defined]
            pose = tee.pose_of(np.array(env.base_env.block.position), env.base_env.block.angle)
            offsets.append(pose - tee.GOAL)
            finger = np.array(env.base_env.agent.position)
            assert tee.clearance(tee.to_block(finger[None, None], pose[None])) > tee.FINGER + 9.0
    spread = np.abs(offsets).max(0)
    assert (spread < [60.1, 60.1, 0.61]).all() and (spread > [40.0, 40.0, 0.4]).all()
    again = sim.reset(18)["keypoints"]
    assert torch.equal(sim.reset(18)["keypoints"], again) and not torch.equal(sim.reset(3)["keypoints"], again)


@pytest.mark.usefixtures("gym_pusht")
def test_the_model_predicts_gym_pusht() -> None:
    sim = make_sim("push_t", SimOptions(num_envs=1))
    sim.reset(3)
    env = sim.envs[0]  # type: ignore[attr-defined]
    pose = tee.pose_of(np.array(env.base_env.block.position), env.base_env.block.angle)
    corners = tee.to_world(tee.OUTLINE, pose[None])[0]
    known = env.keypoints()
    assert all(np.abs(known - corner).sum(1).min() < 1e-6 for corner in corners[[0, 1, 4, 5]])
    start, direction = tee.to_world(np.array([[40.0, -45.0 - 25.0]]), pose[None])[0, 0], np.array([0.0, 1.0])
    direction = tee.to_world(direction[None], np.array([[0.0, 0.0, pose[2]]]))[0, 0]
    env.base_env.agent.position = start.tolist()
    env.base_env.agent.velocity = (0, 0)
    for _ in range(15):
        sim.step(torch.from_numpy((start + 50 * direction).astype(np.float32))[None])
    found = tee.pose_of(np.array(env.base_env.block.position), env.base_env.block.angle)
    expected = tee.push(pose[None], start[None], direction[None], 50.0, 1.0)[-1, 0]
    np.testing.assert_allclose(found[:2], expected[:2], atol=2.0)
    assert abs(found[2] - expected[2]) < 0.04


@pytest.mark.usefixtures("gym_pusht")
def test_shaped_returns_are_the_best_coverage() -> None:
    sim = make_sim("push_t", SimOptions(num_envs=1, reward="shaped"))
    sim.reset(1)
    total, best = 0.0, 0.0
    env = sim.envs[0]  # type: ignore[attr-defined]
    for k in range(30):
        step = sim.step(torch.tensor([[256.0 + 100 * math.cos(k), 256.0 + 100 * math.sin(k)]]))
        total += float(step.reward)
        best = max(best, min(1.0, env.base_env._get_coverage() / 0.95))
        assert total == pytest.approx(best, abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("gym_pusht")
def test_expert_covers_the_goal() -> None:
    from robopolicy_tasks.push_t.expert import PushTExpert

    sim, expert = make_sim("push_t", SimOptions(num_envs=4)), PushTExpert()
    obs, solved = sim.reset(0), 0
    finished = torch.zeros(4, dtype=torch.bool)
    while not bool(finished.all()):
        step = sim.step(expert(sim, obs))
        obs = step.obs
        solved += int((step.info["success"] & ~finished).sum())
        finished |= step.done
    assert solved == 4


def test_missing_gym_pusht_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr("robopolicy_tasks.optional_envs.import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'robopolicy\[pusht\]'"):
        make_sim("push_t/push_t")
