"""Swing-up of a pole on a cart: the equations of the classic cart-pole, without friction.

The pole starts hanging. Small pushes on the cart are the disturbance. The reward is high while the pole is upright over
the middle of the track; an episode that ends in this state is a success.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from robopolicy.contrib.known_dynamics.dynamics import DifferentiableDynamics, Outcome
from robopolicy.sim.contract import Observation, SimSpec, TensorSpec

DT, SUBSTEPS = 0.05, 2  # [s] control step, and integration steps in it
STEPS = 80  # control steps of an episode
CART, POLE, HALF = 1.0, 0.1, 0.5  # [kg] masses, [m] half the length of the pole
GRAVITY = 9.81  # [m/s^2]
FORCE = 10.0  # [N] maximum force
PUSH = 0.2  # [N] standard deviation of the disturbance
TRACK = 2.4  # [m] half of the rendered width


class CartPole(DifferentiableDynamics):
    """State: position [m], angle from upright [rad], and their velocities."""

    def __init__(self) -> None:
        names = ("x [m]", "cos_angle", "sin_angle", "v [m/s]", "angular_v [rad/s]")
        self.spec = SimSpec(
            task="differentiable/cart_pole",
            observation={"state": TensorSpec((5,), names=names)},
            action_low=torch.full((1,), -FORCE),
            action_high=torch.full((1,), FORCE),
            control_dt=DT,
            max_episode_steps=STEPS,
            action_names=("force [N]",),
        )

    def scenario(self, seed: int) -> tuple[Tensor, Tensor]:
        """A hanging pole, nearly at rest, and the pushes."""
        rng = np.random.default_rng(seed)
        state = rng.uniform(-0.5, 0.5, 4) + np.array([0.0, math.pi, 0.0, 0.0])
        noise = rng.normal(0.0, PUSH, (STEPS, 1))
        return torch.tensor(state, dtype=torch.float32), torch.tensor(noise, dtype=torch.float32)

    def observe(self, state: Tensor) -> Observation:
        """Position, direction of the pole, velocities."""
        x, angle, speeds = state.split([1, 1, 2], 1)
        return {"state": torch.cat([x, angle.cos(), angle.sin(), speeds], 1)}

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> Outcome:
        """Push the cart with the force `action + noise` `(B, 1)` [N] for one control step."""
        x, angle, v, spin = state.unbind(1)
        force = (action + noise)[:, 0]
        for _ in range(SUBSTEPS):
            sin, cos = angle.sin(), angle.cos()
            drive = (force + POLE * HALF * spin.square() * sin) / (CART + POLE)
            turn = (GRAVITY * sin - cos * drive) / (HALF * (4 / 3 - POLE * cos.square() / (CART + POLE)))
            v = v + DT / SUBSTEPS * (drive - POLE * HALF * turn * cos / (CART + POLE))
            spin = spin + DT / SUBSTEPS * turn
            x, angle = x + DT / SUBSTEPS * v, angle + DT / SUBSTEPS * spin
        upright = (1 + angle.cos()) / 2
        effort = 0.05 * x.square() + 0.001 * spin.square() + 0.0002 * force.square()
        return Outcome(torch.stack([x, angle, v, spin], 1), upright - effort)

    def is_success(self, state: Tensor) -> Tensor:
        """Whether the pole is upright within 15 degrees, slow, and on the track."""
        x, angle, _, spin = state.unbind(1)
        return (angle.cos() > math.cos(math.radians(15))) & (spin.abs() < 1.0) & (x.abs() < TRACK)

    def draw(self, state: Tensor, height: int, width: int) -> Tensor:
        """Render cart and pole from the side; the image is as wide as the track."""
        scale = 2 * TRACK / width  # [m/pixel]
        columns = (torch.arange(width) + 0.5 - width / 2) * scale
        rows = (height / 2 - 0.5 - torch.arange(height))[:, None] * scale  # (h, 1), upwards
        x, angle = state[:, 0, None, None], state[:, 1, None, None]
        dx, dy = columns - x, rows.expand(len(state), height, 1)  # (B, 1, w), (B, h, 1)
        along = (dx * angle.sin() + dy * angle.cos()).clamp(0.0, 2 * HALF)
        pole = (dx - along * angle.sin()).square() + (dy - along * angle.cos()).square() < 0.05**2
        cart = (dx.abs() < 0.25) & (dy.abs() < 0.12)
        rail = (dy.abs() < scale) & (columns.abs() <= TRACK)
        picture = torch.full((len(state), 3, height, width), 217, dtype=torch.uint8)
        for cover, colour in ((rail, (120, 120, 120)), (cart, (51, 76, 204)), (pole, (217, 51, 51))):
            paint = torch.tensor(colour, dtype=torch.uint8)[:, None, None]
            picture = torch.where(cover[:, None], paint, picture)
        return picture
