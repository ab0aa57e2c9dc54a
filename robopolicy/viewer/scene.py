"""Bodies of a simulator and predicted paths in the 3D scene of viser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.optional import require
from robopolicy.sim.physics_state import BodyPositions, MujocoState, PhysicsState

Array = NDArray[np.float64]
PATH_START, PATH_END = (255, 122, 0), (224, 0, 96)  # colours of a predicted path
END_EFFECTOR = "end effector"
BODY_COLOUR = (60, 110, 180)
VIEW_DIRECTION, VIEW_DISTANCE, VIEW_ANGLE = (0.78, 0.45, 0.43), 2.2, 45.0  # distance in extents, angle in degrees
ENVIRONMENT_LIGHT = 0.25  # brightness of the environment; white robots are overexposed by more
COLLISION_GROUP = 3  # geoms of this group and above are hidden at first, as in MuJoCo
FACING_X = (0.5, 0.5, 0.5, 0.5)  # orientation (w, x, y, z) of a picture in the y-z plane
FREE, SLIDE = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_SLIDE)


def make_scene(server: Any, state: PhysicsState) -> MujocoScene | PointScene:
    """Replace the scene of the viser server by one that shows `state`."""
    server.scene.reset()
    return MujocoScene(server, state) if isinstance(state, MujocoState) else PointScene(server, state)


class MujocoScene:
    """Meshes of a MuJoCo model. Environments may differ in positions only; other edits of a model are not shown.

    `points` are names of what can have a path, with the bodies whose mean position it is.
    """

    def __init__(self, server: Any, state: MujocoState) -> None:
        mjviser = require("mjviser", "viewer")
        self._model = copy(state.model)  # mjviser changes its visual options
        self._data = mujoco.MjData(self._model)
        self._scene = mjviser.ViserMujocoScene(server, self._model, num_envs=1)
        tool = end_effector(self._model)
        bodies = {self._model.body(index).name or f"body {index}": (index,) for index in range(1, self._model.nbody)}
        self.points: dict[str, tuple[int, ...]] = {END_EFFECTOR: tool} | bodies
        self.follows = _has_moving_base(self._model, tool[0])

        server.scene.configure_environment_map(environment_intensity=ENVIRONMENT_LIGHT)
        centre = np.zeros(3) if self.follows else self._model.stat.center
        _place_camera(server, centre, float(self._model.stat.extent))

    @property
    def follows(self) -> bool:
        """Whether the scene moves with the robot."""
        return self._scene.camera_tracking_enabled

    @follows.setter
    def follows(self, value: bool) -> None:
        self._scene.camera_tracking_enabled = value

    @property
    def collisions(self) -> bool:
        """Whether the geoms of collisions are visible."""
        return self._scene.geom_groups_visible[COLLISION_GROUP]

    @collisions.setter
    def collisions(self, value: bool) -> None:
        for group in range(COLLISION_GROUP, len(self._scene.geom_groups_visible)):
            self._scene.geom_groups_visible[group] = value
        self._scene.request_update()

    def fits(self, state: PhysicsState) -> bool:
        """Whether `state` has a model of the same structure."""
        return isinstance(state, MujocoState) and _structure(state.model) == _structure(self._model)

    def show(self, state: Any) -> None:
        """Move the meshes to the poses of a state that fits."""
        state.apply(self._data)
        self._scene.update_from_mjdata(self._data)

    def path(self, states: Sequence[Any], point: str) -> Array:
        """Positions `(S, 3)` [m] of one of `points` in `states`."""
        bodies, path = list(self.points[point]), np.empty((len(states), 3))
        for position, state in zip(path, states, strict=True):
            state.apply(self._data)
            position[:] = self._data.xpos[bodies].mean(0)
        return path


class PointScene:
    """Points at the bodies of a simulator other than MuJoCo."""

    follows = False

    def __init__(self, server: Any, state: BodyPositions) -> None:
        self._server = server
        self.points = {name: (index,) for index, name in enumerate(state.names)}
        server.scene.add_frame("/fixed_bodies", show_axes=False)
        server.scene.add_grid("/ground", infinite_grid=True, fade_distance=50.0)
        _place_camera(server, state.positions.mean(0), max(1.0, float(np.ptp(state.positions, 0).max())))

    def fits(self, state: PhysicsState) -> bool:
        """Whether `state` has the same bodies."""
        return isinstance(state, BodyPositions) and state.names == tuple(self.points)

    def show(self, state: Any) -> None:
        """Move the points to a state that fits."""
        points = state.positions.astype(np.float32)
        self._server.scene.add_point_cloud("/fixed_bodies/points", points, BODY_COLOUR, point_size=0.03)

    def path(self, states: Sequence[Any], point: str) -> Array:
        """Positions `(S, 3)` [m] of one of `points` in `states`."""
        (body,) = self.points[point]
        return np.array([state.positions[body] for state in states]).reshape(-1, 3)


def _place_camera(server: Any, centre: Array, extent: float) -> None:
    """Look at `centre` [m] of a scene of size `extent` [m] from the front, at an angle."""
    server.initial_camera.look_at = centre
    server.initial_camera.position = centre + VIEW_DISTANCE * extent * np.array(VIEW_DIRECTION)
    server.initial_camera.fov = np.radians(VIEW_ANGLE)


BodyScene = MujocoScene | PointScene


def draw_path(server: Any, points: Array) -> None:
    """Draw a path `(S, 3)` [m] as a line whose colour fades with time; fewer than two points remove it."""
    name = "/fixed_bodies/predicted_path"  # moves with the scene
    if len(points) < 2:
        server.scene.remove_by_name(name)
        return
    fade = np.linspace(0.0, 1.0, len(points))[:, None]
    colours = np.round((1 - fade) * np.array(PATH_START) + fade * np.array(PATH_END)).astype(np.uint8)
    server.scene.add_line_segments(
        name,
        np.stack([points[:-1], points[1:]], 1).astype(np.float32),
        np.stack([colours[:-1], colours[1:]], 1),
        thickness=6.0,
        thickness_units="screen",
    )


def draw_pictures(server: Any, images: Mapping[str, NDArray[np.uint8]]) -> None:
    """Show images `{name: (h, w, 3)}` side by side, 1 m high, facing the camera."""
    aspects = {name: image.shape[1] / image.shape[0] for name, image in images.items()}
    left = -0.5 * sum(aspects.values())
    for name, image in images.items():
        place = (0.0, left + aspects[name] / 2, 0.0)
        server.scene.add_image(f"/pictures/{name}", image, aspects[name], 1.0, wxyz=FACING_X, position=place)
        left += 1.05 * aspects[name]


def end_effector(model: mujoco.MjModel) -> tuple[int, ...]:
    """Indices of the bodies whose mean position is the end effector, such as the fingers of an arm.

    The last common ancestor of the most distal actuated bodies is the trunk of a robot with legs, which is returned. If
    actuators move it as well it belongs to an arm, and the last bodies behind it are returned.
    """
    kinds = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT))
    moved = np.isin(model.actuator_trntype, kinds)
    actuated = {int(body) for body in model.jnt_bodyid[model.actuator_trnid[moved, 0]]}
    chains = {body: _ancestors(model, body) for body in actuated}
    inner = {ancestor for chain in chains.values() for ancestor in chain[1:]}
    distal = [chains[body] for body in sorted(actuated - inner)]
    if not distal:
        return (min(1, model.nbody - 1),)
    common = next(body for body in distal[0] if all(body in chain for chain in distal))
    if actuated.isdisjoint(_ancestors(model, common)):
        return (common,)
    behind = [body for body in range(model.nbody) if common in _ancestors(model, body)]
    parents = {int(model.body_parentid[body]) for body in behind}
    return tuple(body for body in behind if body not in parents)


def _ancestors(model: mujoco.MjModel, body: int) -> list[int]:
    """The body, its parent and so on, up to the world."""
    chain = [body]
    while chain[-1]:
        chain.append(int(model.body_parentid[chain[-1]]))
    return chain


def _has_moving_base(model: mujoco.MjModel, body: int) -> bool:
    """Whether the root of a body moves freely, or slides in two directions."""
    root = int(model.body_rootid[body])
    kinds = model.jnt_type[model.jnt_bodyid == root].tolist()
    return FREE in kinds or kinds.count(SLIDE) > 1


def _structure(model: mujoco.MjModel) -> tuple[int, ...]:
    return model.nbody, model.ngeom, model.nq, model.nmesh, model.nsite
