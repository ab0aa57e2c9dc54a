"""Tests of the states of bodies that simulators give to 3D views."""

from types import SimpleNamespace

import mujoco
import numpy as np
import pytest
import torch

from robopolicy.sim.backends.isaaclab import body_positions
from robopolicy.sim.backends.mjlab import mujoco_state
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.physics_state import BodyPositions, MujocoState, PhysicsState
from robopolicy.sim.registry import SimOptions, make_sim

SLIDER = """<mujoco><worldbody>
<body name="cart" pos="0 0 1"><joint name="x" type="slide" axis="1 0 0"/><geom size=".1"/></body>
<body name="goal" mocap="true" pos="2 0 0"><geom size=".1" contype="0" conaffinity="0"/></body>
</worldbody></mujoco>"""


def poses(state: PhysicsState | None) -> dict[str, list[float]]:
    assert isinstance(state, MujocoState)
    data = mujoco.MjData(state.model)
    state.apply(data)
    return {state.model.body(i).name: data.xpos[i].tolist() for i in range(1, state.model.nbody)}


def hand(sim: VectorSim) -> np.ndarray:
    return np.array(poses(sim.physics_state())["hand"])


def test_positions_determine_the_poses_of_bodies() -> None:
    model = mujoco.MjModel.from_xml_string(SLIDER)
    data = mujoco.MjData(model)
    data.qpos[:], data.mocap_pos[:] = 0.5, [3.0, 1.0, 0.0]
    state = MujocoState.of(model, data)
    data.qpos[:], data.mocap_pos[:] = 0.0, 0.0  # the state is a copy
    assert poses(state) == {"cart": [0.5, 0.0, 1.0], "goal": [3.0, 1.0, 0.0]}


@pytest.mark.parametrize("backend", ["mujoco", "mujoco-exact"])
def test_states_of_both_engines_follow_the_observed_hand(backend: str) -> None:
    sim = make_sim("lift", SimOptions(num_envs=2, backend=backend))
    obs = sim.reset(3)
    first = hand(sim)
    for _ in range(5):
        obs = sim.step(sim.spec.action_high.repeat(2, 1)).obs
    state = sim.physics_state(1)
    assert isinstance(state, MujocoState)
    np.testing.assert_allclose(state.qpos[7:14], obs["state"][1, :7], atol=1e-6)
    assert np.linalg.norm(hand(sim) - first) > 0.01
    sim.close()


def test_gymnasium_environments_show_their_model() -> None:
    sim = make_sim("gymnasium/Hopper-v5", SimOptions(num_envs=1))
    obs = sim.reset(0)
    state = sim.physics_state()
    assert isinstance(state, MujocoState)
    np.testing.assert_allclose(state.qpos[1:], obs["state"][0, :5], rtol=1e-6)
    sim.close()


def test_simulators_without_bodies_have_no_state() -> None:
    sim = make_sim("point_mass", SimOptions(num_envs=1))
    sim.reset(0)
    assert sim.physics_state() is None


def test_rows_of_mjlab_are_downloaded() -> None:
    data = SimpleNamespace(
        qpos=torch.tensor([[0.0], [0.25]]), mocap_pos=torch.zeros(2, 1, 3), mocap_quat=torch.eye(4)[:2, None]
    )
    env = SimpleNamespace(sim=SimpleNamespace(data=data, mj_model=mujoco.MjModel.from_xml_string(SLIDER)))
    assert poses(mujoco_state(env, 1))["cart"] == [0.25, 0.0, 1.0]


def test_bodies_of_isaac_lab_are_relative_to_the_origin_of_their_environment() -> None:
    def entity(names: list[str], *positions: list[float]) -> SimpleNamespace:
        rows = torch.stack([torch.zeros(len(names), 3), torch.tensor(positions)])
        return SimpleNamespace(body_names=names, data=SimpleNamespace(body_pos_w=rows))

    scene = SimpleNamespace(
        articulations={"robot": entity(["base", "arm"], [5.0, 0.0, 1.0], [5.0, 0.0, 2.0])},
        rigid_objects={"cube": entity(["cube"], [6.0, 1.0, 0.0])},
        env_origins=torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0]]),
    )
    state = body_positions(SimpleNamespace(scene=scene), 1)
    assert isinstance(state, BodyPositions) and state.names == ("robot/base", "robot/arm", "cube/cube")
    assert state.positions.tolist() == [[0, 0, 1], [0, 0, 2], [1, 1, 0]]
    assert body_positions(SimpleNamespace(scene=SimpleNamespace(env_origins=torch.zeros(1, 3))), 0) is None
