"""Ground contact of a planar robot's feet, from its joint angles only.

MuJoCo computes contacts, but the fast engine returns states only. In the plane a leg is a chain of rotations, so the
lowest point of a foot follows from the angles, vectorised over all environments.
"""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np

from robopolicy.sim.backends.mujoco.task import Array

NEAR = 0.01  # [m] above the ground that counts as contact


class PlanarFeet:
    """Feet of a robot that slides along x and z and turns about y, in this order of its first joints."""

    def __init__(self, model: mujoco.MjModel, geoms: Sequence[str]) -> None:
        """Select the capsules named `geoms`."""
        self.model, self.geoms = model, [model.geom(name) for name in geoms]

    def heights(self, qpos: Array) -> Array:
        """Lowest point `(N, F)` of every foot [m] for positions `(N, nq)`."""
        return np.stack([self._lowest(qpos, geom) for geom in self.geoms], 1)

    def touching(self, qpos: Array) -> Array:
        """1 `(N, F)` where a foot is on the ground, else 0."""
        return (self.heights(qpos) < NEAR).astype(np.float64)

    def _lowest(self, qpos: Array, geom: mujoco.MjModel) -> Array:
        body = int(geom.bodyid[0])
        point, angle = self._frame(qpos, body)
        rotation = np.zeros(9)
        mujoco.mju_quat2Mat(rotation, geom.quat)
        centre, axis = geom.pos[[0, 2]], geom.size[1] * rotation.reshape(3, 3)[[0, 2], 2]
        ends = [point + _rotated(np.broadcast_to(end, point.shape), angle) for end in (centre - axis, centre + axis)]
        return np.minimum(ends[0][:, 1], ends[1][:, 1]) - geom.size[0]

    def _frame(self, qpos: Array, body: int) -> tuple[Array, Array]:
        """Origin `(N, 2)` (x, z) and pitch `(N,)` of a body."""
        model = self.model
        if body == 0:
            return np.zeros((len(qpos), 2)), np.zeros(len(qpos))
        point, angle = self._frame(qpos, int(model.body_parentid[body]))
        point = point + _rotated(np.broadcast_to(model.body_pos[body][[0, 2]], point.shape), angle)
        for joint in range(model.body_jntadr[body], model.body_jntadr[body] + model.body_jntnum[body]):
            address = int(model.jnt_qposadr[joint])
            moved, axis = qpos[:, address] - model.qpos0[address], model.jnt_axis[joint]
            if model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_SLIDE:
                point = point + moved[:, None] * axis[[0, 2]]
                continue
            arm = np.broadcast_to(model.jnt_pos[joint][[0, 2]], point.shape)
            anchor = point + _rotated(arm, angle)
            angle = angle + moved * axis[1]
            point = anchor - _rotated(arm, angle)
        return point, angle


def _rotated(vector: Array, angle: Array) -> Array:
    """Rotate vectors `(N, 2)` (x, z) by `angle` `(N,)` about y."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([cos * vector[:, 0] + sin * vector[:, 1], cos * vector[:, 1] - sin * vector[:, 0]], 1)
