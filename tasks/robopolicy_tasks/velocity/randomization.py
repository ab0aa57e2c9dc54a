"""Domain randomization per episode: ground, payload, motors, sensors and pushes."""

from __future__ import annotations

from dataclasses import dataclass

import mujoco
import numpy as np

from robopolicy.sim.backends.mujoco.task import Array
from robopolicy.sim.batch_generator import BatchGenerator
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


def edited_fields(
    ranges: Randomization, model: mujoco.MjModel, rng: np.random.Generator | BatchGenerator
) -> dict[str, Array]:
    """Sample the changed fields `(..., *shape)` of `model` for one episode or several; none for the nominal robot."""
    friction, payload = (np.asarray(rng.uniform(*bounds)) for bounds in (ranges.friction, ranges.payload))
    offset = rng.uniform(-ranges.payload_offset, ranges.payload_offset, 3)
    strength = np.asarray(rng.uniform(*ranges.motor_strength))
    changed = (ranges.friction, ranges.payload, ranges.motor_strength, ranges.payload_offset)
    if changed == (NOMINAL.friction, NOMINAL.payload, NOMINAL.motor_strength, NOMINAL.payload_offset):
        return {}
    names = ("body_mass", "body_inertia", "body_ipos", "geom_friction")
    names += ("actuator_gainprm", "actuator_biasprm", "actuator_forcerange")
    values = {name: np.asarray(getattr(model, name)) for name in names}
    fields = {name: np.broadcast_to(value, (*payload.shape, *value.shape)).copy() for name, value in values.items()}
    trunk, mass = model.body(TRUNK).id, fields["body_mass"]
    fields["body_inertia"][..., trunk, :] *= ((mass[..., trunk] + payload) / mass[..., trunk])[..., None]
    mass[..., trunk] += payload
    fields["body_ipos"][..., trunk, :] += offset
    fields["geom_friction"][..., [model.geom(foot).id for foot in FEET], 0] = friction[..., None]
    servos = np.flatnonzero(model.actuator_biastype == mujoco.mjtBias.mjBIAS_AFFINE)
    for name in names[4:]:
        fields[name][..., servos, :] *= strength[..., None, None]
    return fields
