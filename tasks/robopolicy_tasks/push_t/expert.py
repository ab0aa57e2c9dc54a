"""Scripted demonstrator for PushT.

It plans a push in the closed-form model of `tee.py`, moves around the block to the start of the push, pushes, retreats
and plans again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.backends.gymnasium import GymnasiumSim
from robopolicy.sim.contract import Observation, VectorSim
from robopolicy_tasks.push_t import tee
from robopolicy_tasks.push_t.env import PushTEnv
from robopolicy_tasks.push_t.planner import CLEAR, Push, plan, waypoint
from robopolicy_tasks.push_t.tee import Array

MOVE_LEAD = 70.0  # [px] lead of the finger target while moving freely, for about 350 px/s
PUSH_LEAD = 30.0  # [px] lead while pushing
ARRIVED = 5.0  # [px] maximum distance from the start of a push to begin it
DONE = 1.0  # [px] maximum remaining length of a finished push
CENTRE = np.array([256.0, 256.0])  # [px] centre of the arena
MAX_PUSH_STEPS = 60  # maximum steps of a push
_STREAM = 0x7EE  # separates the random stream of the expert from the initial state


@dataclass
class _Stroke:
    """Current plan of one episode."""

    rng: np.random.Generator
    push: Push | None = None
    pushing: bool = False
    steps: int = 0  # since the push was planned


class PushTExpert:
    """Expert with an independent plan per row; an episode depends only on its seed."""

    def __init__(self) -> None:
        self._strokes: dict[int, _Stroke] = {}  # by row

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return targets of the fingers `(N, 2)` [px]."""
        if not isinstance(sim, GymnasiumSim) or not isinstance(sim.envs[0], PushTEnv):
            raise UserError("The PushT expert needs the task push_t/push_t.")
        targets: list[Array] = []
        fresh, seeds = (sim.episode_step == 0).tolist(), sim.episode_seed.tolist()
        for row, env in enumerate(sim.envs):
            assert isinstance(env, PushTEnv)
            if fresh[row] or row not in self._strokes:
                self._strokes[row] = _Stroke(np.random.default_rng([_STREAM, seeds[row]]))
            finger, block = np.array(env.base_env.agent.position), env.base_env.block
            pose = tee.pose_of(np.array(block.position), float(block.angle))
            targets.append(_decide(self._strokes[row], finger, pose))
        return torch.from_numpy(np.stack(targets).astype(np.float32))


def _decide(stroke: _Stroke, finger: Array, pose: Array) -> Array:
    """Target of the finger `(2,)`, from its position `(2,)` and the pose of the block `(3,)`."""
    gap = float(tee.clearance(tee.to_block(finger[None, None], pose[None]))[0, 0])
    if stroke.push is not None and stroke.pushing:
        push, stroke.steps = stroke.push, stroke.steps + 1
        progress = float((finger - push.start) @ push.direction)
        if push.length - progress > DONE and stroke.steps < MAX_PUSH_STEPS:
            return push.start + min(progress + PUSH_LEAD, push.length) * push.direction
        stroke.push = None
    if stroke.push is None:
        if gap < CLEAR:
            return finger + 25.0 * _away(finger, pose)
        stroke.push, stroke.pushing, stroke.steps = plan(pose, finger, stroke.rng), False, 0
        if stroke.push is None:
            return CENTRE  # enclosed: push towards the centre
    if np.linalg.norm(finger - stroke.push.start) < ARRIVED or stroke.steps > MAX_PUSH_STEPS:
        stroke.pushing, stroke.steps = True, 0
        return _decide(stroke, finger, pose)
    stroke.steps += 1
    point = waypoint(finger, stroke.push.start, pose)
    if point is None:  # the block has moved
        stroke.push = None
        return finger
    offset = point - finger
    length = float(np.linalg.norm(offset))
    lead = min(length, MOVE_LEAD) if point is stroke.push.start else MOVE_LEAD  # no stop at waypoints
    return finger + offset * lead / length


def _away(finger: Array, pose: Array) -> Array:
    """Unit vector `(2,)` from the closest point of the block to the finger."""
    contact = tee.closest(tee.to_block(finger[None, None], pose[None]))
    offset = finger - tee.to_world(contact, pose[None])[0, 0]
    return offset / max(float(np.linalg.norm(offset)), 1e-9)
