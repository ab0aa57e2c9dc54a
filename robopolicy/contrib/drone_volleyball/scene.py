"""Construction of the court with its drones, and properties of their airframe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from robopolicy.sim.backends.mujoco.task import Array

ASSETS = Path(__file__).parent
BALL_RADIUS = 0.1  # [m]
BALL_BOUNCE = 0.8  # fraction of the normal speed after a bounce
BALL_KEPT = 0.84  # fraction of the tangential speed of a ball without spin after a bounce
NET_HEIGHT = 2.43  # [m]
COURT: Array = np.array([12.0, 6.0])  # [m] length along x, across the net, and width along y
PADDLE_TOP = 0.107  # [m] above the drone's centre
PADDLE_RADIUS = 0.2  # [m]
GRAVITY = 9.81  # [m/s^2]
UP: Array = np.array([0.0, 0.0, 1.0])
COLOURS = ((0.15, 0.45, 0.85, 1.0), (0.80, 0.25, 0.45, 1.0))  # of the drones' shells


def build_model(drones: int, *, target: bool = False) -> mujoco.MjModel:
    """Compile `volley.xml` with drones `drone0`, `drone1`, ...; `target` adds a sliding mark."""
    scene = mujoco.MjSpec.from_file(str(ASSETS / "volley.xml"))
    for index in range(drones):
        drone = mujoco.MjSpec.from_file(str(ASSETS / "quadrotor.xml"))
        drone.material("shell").rgba = COLOURS[index]
        scene.attach(drone, prefix=f"drone{index}_", frame=scene.worldbody.add_frame())
    if target:
        mark = scene.worldbody.add_body(name="target")
        mark.mass, mark.inertia, mark.explicitinertial = 1.0, [1.0, 1.0, 1.0], True
        for name, axis in (("target_x", [1, 0, 0]), ("target_y", [0, 1, 0])):
            mark.add_joint(name=name, type=mujoco.mjtJoint.mjJNT_SLIDE, axis=axis)
        for radius, material in ((0.75, "target"), (0.5, "line"), (0.44, "target")):
            mark.add_geom(
                type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=[radius, 0.002 - 0.001 * radius, 0], material=material,
                contype=0, conaffinity=0,
            )  # fmt: skip
    return scene.compile()


@dataclass(frozen=True)
class Airframe:
    """Mass, inertia and rotors of a drone."""

    mass: float  # [kg]
    inertia: Array  # (3,) [kg m^2] about its own axes
    mixer: Array  # (4, 4) thrusts of the rotors [N] to total thrust [N] and torque about the own axes [N m]
    max_thrust: float  # [N] of one rotor

    @classmethod
    def of(cls, model: mujoco.MjModel, drone: int = 0) -> Airframe:
        """Read the airframe from a model."""
        body = model.body(f"drone{drone}_drone")
        rotors = [model.actuator(f"drone{drone}_rotor{i}") for i in range(4)]
        places = np.stack([model.site(f"drone{drone}_rotor{i}").pos for i in range(4)])
        drag = [rotor.gear[5] for rotor in rotors]
        mixer = np.stack([np.ones(4), places[:, 1], -places[:, 0], drag])
        return cls(float(body.mass[0]), body.inertia.copy(), mixer, float(rotors[0].ctrlrange[1]))

    def thrusts(self, total: Array, torque: Array) -> Array:
        """Rotor thrusts `(..., 4)` [N] for `total` `(...)` [N] and `torque` `(..., 3)` [N m]; not clipped."""
        return np.concatenate([total[..., None], torque], -1) @ np.linalg.inv(self.mixer).T

    def hover(self) -> Array:
        """Thrusts `(4,)` [N] that balance the weight without torque."""
        return self.thrusts(np.array(self.mass * GRAVITY), np.zeros(3))
