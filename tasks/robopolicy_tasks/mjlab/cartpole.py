"""Swing-up of mjlab's cart-pole with a sparse reward, and its scripted demonstrator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from robopolicy.sim.backends.mjlab import mjlab_config, simulate_mjlab
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy.sim.registry import SimOptions

TASK = "mjlab/cartpole_swingup_sparse"
EPISODE = 10.0  # [s]
UPRIGHT = 0.95  # minimum cosine of the pole's angle
CENTERED = 1.0  # [m] maximum distance of the cart from the centre
CART, POLE, PIVOT_TO_MASS, FORCE = 1.0, 0.1, 0.5, 10.0  # [kg], [kg], [m], [N] at action 1
INERTIA = 0.0335  # [kg m^2] of the pole about its pivot


def make_sparse_swingup(options: SimOptions) -> VectorSim:
    """Build the cart-pole; reward 1 per step with the pole upright and the cart near the centre, else 0."""
    config = mjlab_config("Mjlab-Cartpole-Swingup", options.num_envs)
    from mjlab.managers import RewardTermCfg

    config.episode_length_s = EPISODE
    config.scale_rewards_by_dt = False
    if options.reward == "sparse":
        config.rewards = {"upright": RewardTermCfg(func=_is_upright, weight=1.0)}
    return simulate_mjlab(config, options, task=TASK)


def _is_upright(env: Any) -> Tensor:
    """(N,) 1 where the pole is upright near the centre."""
    position, angle = env.scene["cartpole"].data.joint_pos.unbind(1)  # cart [m], pole [rad], 0 is upright
    return ((angle.cos() > UPRIGHT) & (position.abs() < CENTERED)).float()


class SwingUpExpert:
    """Energy control that swings the pole up, then linear feedback; it wins about three quarters of the steps."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return actions `(N, 1)` in [-1, 1]."""
        position, cosine, sine, velocity, rate = obs["actor"].unbind(1)
        gravity = POLE * 9.81 * PIVOT_TO_MASS
        energy = 0.5 * INERTIA * rate**2 + gravity * (cosine - 1.0)  # [J], 0 at rest upright
        swing = 25.0 * energy * torch.sign(rate * cosine) - 3.0 * position - 2.0 * velocity  # [m/s^2]
        angle = torch.atan2(sine, cosine)
        balance = 1.5 * position + 2.5 * velocity + 40.0 * angle + 8.0 * rate  # [N]
        catches = (cosine > math.cos(0.6)) & (rate.abs() < 4.0)
        force = torch.where(catches, balance, (CART + POLE) * swing)
        return (force / FORCE).clamp(-1.0, 1.0).unsqueeze(1)
