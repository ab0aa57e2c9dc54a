"""Tests of optional task families: DeepMind Control, Gymnasium-Robotics and robosuite satisfy the contract."""

import numpy as np
import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.gl import gl_backend
from robopolicy.sim.registry import SimOptions, get_task, make_sim

KINDS = [
    ("dm_control/walker-walk", "dm_control", {"state": (24,)}, 6, 1000, 0.025),
    (
        "gymnasium_robotics/FetchReach-v4",
        "gymnasium_robotics",
        {"observation": (10,), "achieved_goal": (3,), "desired_goal": (3,)},
        4,
        50,
        0.04,
    ),
    pytest.param(
        "robosuite/Lift", "robosuite", {"robot": (50,), "object": (10,)}, 7, 500, 0.05, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("name", "package", "sizes", "actions", "limit", "dt"), KINDS)
def test_family_satisfies_the_contract(
    name: str, package: str, sizes: dict[str, tuple[int]], actions: int, limit: int, dt: float
) -> None:
    pytest.importorskip(package)
    sim = make_sim(name, SimOptions(num_envs=2))
    assert {key: spec.shape for key, spec in sim.spec.observation.items()} == sizes
    assert (sim.spec.action_dim, sim.spec.max_episode_steps, sim.spec.control_dt) == (actions, limit, dt)
    assert check_simulator(sim, lambda n: make_sim(name, SimOptions(n))) == []


def test_dm_control_truncates_episodes_at_the_time_limit() -> None:
    pytest.importorskip("dm_control")
    sim = make_sim("dm_control/cartpole-balance", SimOptions(num_envs=1))
    sim.reset(0)
    total = 0.0
    for number in range(1000):
        step = sim.step(torch.zeros(1, 1))
        total += float(step.reward)
        assert bool(step.done) == (number == 999)
    assert step.truncated and not step.terminated
    assert 100 < total < 1000


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("dm_control/cartpole-balance", "dm_control"),
        ("ogbench_collect/cube-single-v0", "ogbench"),
        ("envpool/InvertedPendulum-v5", "envpool"),
    ],
)
def test_episodes_have_seeds_beyond_32_bits(name: str, package: str) -> None:
    pytest.importorskip(package)
    sim = make_sim(name, SimOptions(num_envs=1))
    key = next(iter(sim.spec.observation))
    starts = [sim.reset(seed)[key] for seed in (0, 2**32, 5_000_000_000, 2**32)]
    assert torch.equal(starts[1], starts[3]) and not torch.equal(starts[1], starts[2])
    if sim.spec.seeded_episodes:
        assert not torch.equal(starts[0], starts[1])


def test_fetch_reports_success_at_its_goal() -> None:
    pytest.importorskip("gymnasium_robotics")
    sim = make_sim("gymnasium_robotics/FetchReach-v4", SimOptions(num_envs=2))
    obs = sim.reset(0)
    for _ in range(20):  # actions move the gripper by displacements
        towards = 10 * (obs["desired_goal"] - obs["achieved_goal"])
        step = sim.step(torch.cat([towards, torch.zeros(2, 1)], 1).clamp(-1, 1))
        obs = step.obs
    assert step.info["success"].tolist() == [True, True]
    assert step.reward.tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_robosuite_ends_at_success_and_renders_its_scene() -> None:
    """The hand moves to the cube, closes and rises; positions come from robosuite's object observation."""
    pytest.importorskip("robosuite")
    sim = make_sim("robosuite/Lift", SimOptions(num_envs=1))
    obs = sim.reset(0)
    for number in range(100):
        towards = (10 * obs["object"][0, 7:10]).clamp(-1, 1)  # from the hand to the cube
        move = towards if number < 55 else torch.tensor([0.0, 0.0, 1.0])
        grip = torch.tensor([-1.0 if number < 40 else 1.0])
        step = sim.step(torch.cat([move, torch.zeros(3), grip])[None])
        obs = step.obs
        if step.done:
            break
    assert step.info["success"].tolist() == step.terminated.tolist() == [True]
    assert step.reward.tolist() == [1.0]
    try:
        gl_backend()
    except UserError as error:
        pytest.skip(str(error))
    frame = sim.render(width=64, height=48)
    assert frame.shape == (1, 3, 48, 64)
    assert np.asarray(frame).std() > 10


@pytest.mark.parametrize(
    ("name", "package", "near"),
    [
        ("dm_control/walker-wlak", "dm_control", "walker-walk"),
        ("robosuite/Lift-Pandda", "robosuite", "Lift-Panda"),
        ("robosuite/TwoArmLift", "robosuite", "no environment 'TwoArmLift'"),
    ],
)
def test_unknown_ids_suggest_similar_ones(name: str, package: str, near: str) -> None:
    pytest.importorskip(package)
    with pytest.raises(UserError, match=near):
        make_sim(name, SimOptions(num_envs=1))


def test_missing_package_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package in ("dm_control", "gymnasium_robotics", "robosuite"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"robopolicy_tasks.{package}.env", raising=False)
    wanted = {
        "dm_control/walker-walk": r"pip install 'robopolicy\[dmcontrol\]'",
        "robosuite/Lift": "pip install --no-deps robosuite==1.5.2",
    }
    for name, words in wanted.items():
        with pytest.raises(UserError, match=words):
            make_sim(name, SimOptions(num_envs=1))


def test_the_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "tasks"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{family}/" in listed for family in ("dm_control", "gymnasium_robotics", "robosuite"))
    assert get_task("robosuite/Lift").make_expert is None


def test_the_data_collection_mode_of_ogbench_has_a_name_of_its_own() -> None:
    assert "target visible" in get_task("ogbench_collect/scene-v0").description
    with pytest.raises(UserError, match="is now ogbench_collect/scene-v0: the protocol") as refusal:
        get_task("ogbench/scene-v0")
    assert "\n" not in str(refusal.value)
