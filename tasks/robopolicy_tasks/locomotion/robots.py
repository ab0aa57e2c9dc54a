"""Gymnasium's v5 robots as tasks of the native backend."""

from __future__ import annotations

from typing import cast

import mujoco
import numpy as np
from numpy.typing import NDArray

from robopolicy.mirror_symmetry import MirrorSymmetry, SignedPermutation
from robopolicy.sim.backends.mujoco.task import Array, BatchState, ResetState, StepResult, constant, namespace
from robopolicy_tasks.locomotion.base import GymnasiumRobot, reward_terms


class HalfCheetah(GymnasiumRobot):
    """Planar two-legged runner, 6 motors; run forward."""

    xml, frame_skip = "half_cheetah.xml", 5
    noise, velocity_noise = 0.1, "normal"
    control_cost = 0.1


class Swimmer(GymnasiumRobot):
    """Three-link swimmer in a viscous fluid, 2 motors; swim forward."""

    xml, frame_skip = "swimmer.xml", 4
    noise, skipped = 0.1, 2
    control_cost = 1e-4
    mirror = MirrorSymmetry(
        {"state": SignedPermutation.of([-1, -1, -1, 1, -1, -1, -1, -1])}, SignedPermutation.of([-1, -1])
    )


class InvertedPendulum(GymnasiumRobot):
    """Cart with a pole, 1 motor; keep the pole within 0.2 rad of upright."""

    xml, frame_skip = "inverted_pendulum.xml", 2
    noise, skipped = 0.01, 0

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Reward 1 per step until the pole falls."""
        xp = namespace(after.qpos)
        fallen = xp.abs(after.qpos[:, 1]) > 0.2
        reward = xp.where(fallen, 0.0, 1.0)
        return StepResult(reward, fallen, reward_terms(survive=reward))


class Hopper(GymnasiumRobot):
    """Planar one-legged robot, 3 motors; hop forward without falling."""

    xml, frame_skip = "hopper.xml", 4
    noise, control_cost = 5e-3, 1e-3
    height = (0.7, np.inf)  # [m], of the torso while healthy
    angle = (-0.2, 0.2)  # [rad]
    max_state = 100.0  # |state| without x and z of the torso while healthy

    def observe(self, state: BatchState) -> dict[str, Array]:
        """Positions without world x, then velocities within +-10."""
        xp = namespace(state.qpos)
        return {"state": xp.concat([state.qpos[:, 1:], xp.clip(state.qvel, -10, 10)], axis=1)}

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Forward velocity plus 1 while healthy, minus control cost; a fall ends the episode."""
        healthy = self.healthy(after)
        forward, survive, control = self.forward_velocity(before, after), 1.0 * healthy, self.cost(action)
        return StepResult(
            forward + survive - control, ~healthy, reward_terms(forward=forward, survive=survive, ctrl=-control)
        )

    def healthy(self, state: BatchState) -> NDArray[np.bool_]:
        """(N,) torso height, pitch and state within their ranges."""
        xp, height, angle = namespace(state.qpos), state.qpos[:, 1], state.qpos[:, 2]
        upright = (self.height[0] < height) & (height < self.height[1])
        upright &= (self.angle[0] < angle) & (angle < self.angle[1])
        upright &= (xp.abs(state.qpos[:, 2:]) < self.max_state).all(1)
        return upright & (xp.abs(state.qvel) < self.max_state).all(1)


class Walker2d(Hopper):
    """Planar two-legged robot, 6 motors; walk forward without falling."""

    xml, frame_skip = "walker2d_v5.xml", 4
    height, angle, max_state = (0.8, 2.0), (-1.0, 1.0), np.inf


def _ant_mirror() -> MirrorSymmetry:
    """Left-right symmetry of the ant: legs 1 and 4, and 2 and 3, are swapped; hip angles change sign."""
    torso, rate, legs, wrench = [1, 1, -1, 1, -1], [1, -1, 1, -1, 1, -1], [-1, 1] * 4, [-1, 1, -1, 1, -1, 1]
    joints = [(0, 6), (1, 7), (2, 4), (3, 5)]  # hip and ankle of each pair of legs, in the order of the model
    velocities, forces = len(torso) + len(legs), len(torso) + 2 * len(legs) + len(rate)
    swapped = [(i + start, j + start) for start in (len(torso), velocities + len(rate)) for i, j in joints]
    # The torso and three bodies per leg, with six numbers each.
    swapped += [(forces + 6 + i + 18 * a, forces + 6 + i + 18 * b) for a, b in ((0, 3), (1, 2)) for i in range(18)]
    state = SignedPermutation.of([*torso, *legs, *rate, *legs, *wrench * 13], swapped)
    motors = SignedPermutation.of(legs, [(0, 2), (1, 3), (4, 6), (5, 7)])  # of legs 4, 1, 2, 3
    return MirrorSymmetry({"state": state}, motors)


class Ant(GymnasiumRobot):
    """Four-legged robot, 8 motors; walk forward. Contact forces are observed, so MuJoCo needs the exact engine."""

    xml, frame_skip = "ant.xml", 5
    noise, velocity_noise, skipped = 0.1, "normal", 2
    control_cost, contact_cost = 0.5, 5e-4
    derived_fields = ("xpos", "cfrc_ext")
    needs_exact_engine = True
    mirror = _ant_mirror()

    def state_names(self) -> tuple[str, ...]:
        """One name per element of the observation."""
        return (*super().state_names(), *_per_body(self.model, "external", _WRENCH))

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Sample the initial state of one episode."""
        initial = super().initial(rng)
        initial.memory["torso_x"] = 0.0
        return initial

    def control(self, action: Array, state: BatchState) -> Array:
        """Motor torques; also stores the position of the torso, because body positions lag one physics step."""
        state.memory["torso_x"][:] = state.derived_field("xpos")[:, 1, 0]
        return action

    def observe(self, state: BatchState) -> dict[str, Array]:
        """Positions without world x and y, velocities, contact forces within +-1."""
        forces = self._forces(state)[:, 6:]
        return {"state": namespace(forces).concat([state.qpos[:, 2:], state.qvel, forces], axis=1)}

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """Forward velocity plus 1 while healthy, minus control and contact costs; a fall ends the episode."""
        start = cast(Array, before.memory["torso_x"])
        forward = (after.derived_field("xpos")[:, 1, 0] - start) / self.dt
        height = after.qpos[:, 2]
        healthy = (height >= 0.2) & (height <= 1.0)
        survive, control = 1.0 * healthy, self.cost(action)
        contact = self.contact_cost * namespace(action).square(self._forces(after)).sum(1)
        reward = forward + survive - (control + contact)
        return StepResult(
            reward, ~healthy, reward_terms(forward=forward, survive=survive, ctrl=-control, contact=-contact)
        )

    def _forces(self, state: BatchState) -> Array:
        """(N, 6 * bodies) external wrench on every body, clipped to +-1."""
        return namespace(state.qpos).clip(state.derived_field("cfrc_ext"), -1.0, 1.0).reshape(len(state), -1)


class Humanoid(GymnasiumRobot):
    """Humanoid, 17 motors; walk forward. Inertias and forces are observed, so MuJoCo needs the exact engine."""

    xml, frame_skip = "humanoid.xml", 5
    noise, skipped = 1e-2, 2
    control_cost, contact_cost = 0.1, 5e-7
    derived_fields = ("cinert", "cvel", "cfrc_ext", "qfrc_actuator", "xipos")
    needs_exact_engine = True

    def state_names(self) -> tuple[str, ...]:
        """One name per element of the observation."""
        velocities = super().state_names()[self.model.nq - 2 + 6 :]
        return (
            *super().state_names(),
            *_per_body(self.model, "inertia", [str(i) for i in range(10)]),
            *_per_body(self.model, "velocity", _WRENCH),
            *(name.replace("velocity [rad/s]", "torque [N m]") for name in velocities),
            *_per_body(self.model, "external", _WRENCH),
        )

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Sample the initial state of one episode."""
        initial = super().initial(rng)
        initial.memory["mass_x"] = 0.0
        return initial

    def control(self, action: Array, state: BatchState) -> Array:
        """Motor torques; also stores the centre of mass, because positions of MuJoCo lag one physics step."""
        state.memory["mass_x"][:] = self._mass_x(state)
        return action

    def observe(self, state: BatchState) -> dict[str, Array]:
        """Positions without world x and y, velocities, body inertias and velocities, motor and external forces."""
        parts = [state.derived_field(name)[:, 1:] for name in ("cinert", "cvel", "cfrc_ext")]
        inertia, velocity, external = (part.reshape(len(state), -1) for part in parts)
        motors = state.derived_field("qfrc_actuator")[:, 6:]
        values = [state.qpos[:, 2:], state.qvel, inertia, velocity, motors, external]
        return {"state": namespace(motors).concat(values, axis=1)}

    def outcome(self, before: BatchState, action: Array, after: BatchState) -> StepResult:
        """1.25 x forward velocity plus 5 while healthy, minus control and contact costs; a fall ends the episode."""
        xp, start = namespace(action), cast(Array, before.memory["mass_x"])
        velocity = (self._mass_x(after) - start) / self.dt
        healthy = (after.qpos[:, 2] > 1.0) & (after.qpos[:, 2] < 2.0)
        forces = after.derived_field("cfrc_ext").reshape(len(after), -1)
        contact = xp.clip(self.contact_cost * xp.square(forces).sum(1), None, 10.0)
        forward, survive, control = 1.25 * velocity, 5.0 * healthy, self.control_cost * xp.square(action).sum(1)
        reward = forward + survive - (control + contact)
        return StepResult(
            reward, ~healthy, reward_terms(forward=forward, survive=survive, ctrl=-control, contact=-contact)
        )

    def _mass_x(self, state: BatchState) -> Array:
        """(N,) x of the centre of mass [m]."""
        mass, centres = self.model.body_mass[:, None], state.derived_field("xipos")
        return (constant(mass, centres) * centres).sum(1)[:, 0] / float(mass.sum())


_WRENCH = ("rx", "ry", "rz", "x", "y", "z")


def _per_body(model: mujoco.MjModel, quantity: str, components: tuple[str, ...] | list[str]) -> list[str]:
    bodies = [model.body(i).name or f"body{i}" for i in range(1, model.nbody)]
    return [f"{body} {quantity} {component}" for body in bodies for component in components]
