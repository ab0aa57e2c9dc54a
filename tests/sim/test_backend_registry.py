"""Tests of the backend table: its flags match the simulators that the backends create."""

import pytest
from lab_rail import Rail

from robopolicy import plugins
from robopolicy.errors import UserError
from robopolicy.sim.backends import BACKENDS, Backend
from robopolicy.sim.backends.isaac_style import IsaacStyleSim
from robopolicy.sim.contract import SimSpec
from robopolicy.sim.registry import SimOptions, get_task, make_sim, task_families


def agrees(row: Backend, spec: SimSpec) -> bool:
    return row.repeatable == spec.seeded_episodes


@pytest.mark.parametrize(("task", "backend"), [("lift", "mujoco"), ("hopper", "gymnasium"), ("point_mass", "torch")])
def test_backend_row_matches_simulator_capabilities(task: str, backend: str):
    sim = make_sim(task, SimOptions(1, backend=backend))
    assert agrees(BACKENDS[backend], sim.spec)
    sim.close()


@pytest.mark.parametrize("backend", ["mjlab", "isaaclab"])
def test_mjlab_and_isaac_lab_have_equal_capabilities(backend: str):
    assert agrees(BACKENDS[backend], IsaacStyleSim(Rail("mjlab"), task="test/rail").spec)


def test_maker_summaries_need_no_import(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugins.importlib, "import_module", None)
    assert all(plugins.summary(row.make).endswith(".") for row in BACKENDS.values() if row.make)


def test_backends_by_id_have_a_task_family():
    families = task_families()
    assert {name for name, row in BACKENDS.items() if row.by_id} <= families.keys()
    entry = get_task("envpool/Hopper-v5")
    assert (entry.name, entry.backends, entry.requires) == ("envpool/Hopper-v5", ("envpool",), "envpool")


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("toy/point_mass", "because it has no MuJoCo model; choose torch."),
        ("gymnasium/Hopper-v5", "because another library steps its physics on the CPU; choose gymnasium."),
        ("mjlab/go1_flat", "because mjlab itself runs MuJoCo Warp; choose mjlab."),
        ("text/grid", "because it has no physics; choose text."),
    ],
)
def test_tasks_say_why_they_do_not_run_on_warp(task: str, reason: str):
    with pytest.raises(UserError, match=f"Task {task} does not run on backend 'warp' {reason}"):
        make_sim(task, SimOptions(1, backend="warp"))


def test_a_backend_that_a_task_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"lift does not run on backend 'envpool'; choose mujoco, mujoco-exact, warp\."):
        make_sim("lift", SimOptions(1, backend="envpool"))
