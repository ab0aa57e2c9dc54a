"""Domain randomization per episode: ground, payload, motors, sensors and pushes."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from robopolicy.sim.backends.mujoco.task import Array
from robopolicy_tasks.velocity.scene import FEET, TRUNK

Range = tuple[float, float]


@dataclass(frozen=True)
class Randomization:
    """Ranges of the values of an episode; the defaults are the nominal robot without noise."""

    friction: Range = (0.8, 0.8)  # sliding friction between feet and ground
    payload: Range = (0.0, 0.0)  # [kg] added to the trunk
    payload_offset: float = 0.0  # [m] maximum shift of the centre of mass of the trunk along each axis
    motor_strength: Range = (1.0, 1.0)  # factor of the gains and torque limits of the servos
    push: float = 0.0  # [m/s] maximum change of the velocity by a push
    noise: float = 0.0  # factor of the sensor noise


NOMINAL = Randomization()
TRAINING = Randomization(
    friction=(0.4, 1.2), payload=(-1.0, 3.0), payload_offset=0.03, motor_strength=(0.85, 1.15), push=0.6, noise=1.0
)


def edited_fields(ranges: Randomization, model: mujoco.MjModel, rng: np.random.Generator) -> dict[str, Array]:
    """Sample the changed fields of `model` for one episode; none for the nominal robot."""
    friction, payload = rng.uniform(*ranges.friction), rng.uniform(*ranges.payload)
    offset = rng.uniform(-ranges.payload_offset, ranges.payload_offset, 3)
    strength = rng.uniform(*ranges.motor_strength)
    changed = (ranges.friction, ranges.payload, ranges.motor_strength, ranges.payload_offset)
    if changed == (NOMINAL.friction, NOMINAL.payload, NOMINAL.motor_strength, NOMINAL.payload_offset):
        return {}
    trunk = model.body(TRUNK).id
    mass, inertia, center = model.body_mass.copy(), model.body_inertia.copy(), model.body_ipos.copy()
    inertia[trunk] *= (mass[trunk] + payload) / mass[trunk]
    mass[trunk] += payload
    center[trunk] += offset
    sliding = model.geom_friction.copy()
    sliding[[model.geom(foot).id for foot in FEET], 0] = friction
    servos = np.flatnonzero(model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE)
    gain, bias, limit = model.actuator_gainprm.copy(), model.actuator_biasprm.copy(), model.actuator_forcerange.copy()
    for field in (gain, bias, limit):
        field[servos] *= strength
    return {
        "body_mass": mass,
        "body_inertia": inertia,
        "body_ipos": center,
        "geom_friction": sliding,
        "actuator_gainprm": gain,
        "actuator_biasprm": bias,
        "actuator_forcerange": limit,
    }
