"""State of the bodies of one environment, for 3D views and recordings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mujoco

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MujocoState:
    """Positions of a MuJoCo model, which determine the poses of its bodies."""

    model: mujoco.MjModel
    qpos: Array  # (nq,) [m, rad]
    mocap_pos: Array  # (M, 3) [m] positions of the mocap bodies
    mocap_quat: Array  # (M, 4) their orientations (w, x, y, z)

    @classmethod
    def of(cls, model: mujoco.MjModel, data: Any) -> MujocoState:
        """Copy the positions in an `MjData`, or in an object with its fields for one environment."""
        fields = (np.array(getattr(data, name), np.float64) for name in ("qpos", "mocap_pos", "mocap_quat"))
        return cls(model, *fields)

    def apply(self, data: mujoco.MjData) -> None:
        """Set the positions in `data` and compute the poses of bodies, geoms, sites, cameras and lights."""
        import mujoco

        data.qpos[:], data.mocap_pos[:], data.mocap_quat[:] = self.qpos, self.mocap_pos, self.mocap_quat
        mujoco.mj_kinematics(self.model, data)
        mujoco.mj_camlight(self.model, data)


@dataclass(frozen=True, eq=False)
class BodyPositions:
    """Positions of bodies in a simulator other than MuJoCo."""

    names: tuple[str, ...]  # (B,)
    positions: Array  # (B, 3) [m] in world coordinates


PhysicsState = MujocoState | BodyPositions
