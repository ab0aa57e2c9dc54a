"""Volleyball drills: keep the ball up, hit it over the net to a mark, and pass it between two drones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from robopolicy.contrib.drone_volleyball.court import FAULT, ContactEvent, VolleyTask, length, memory_of
from robopolicy.contrib.drone_volleyball.scene import BALL_RADIUS, NET_HEIGHT, PADDLE_TOP, UP
from robopolicy.sim.backends.mujoco.task import Array, BatchState, ResetState, StepResult, namespace

REACH = PADDLE_TOP + BALL_RADIUS  # [m] from a drone's centre to the centre of a ball on its paddle
LOW_BUMP = 0.2  # reward of the first bump, or of a bump after a low flight
HINT = 0.2  # [1/s] maximum shaped reward
GOOD_BUMPS = 6  # bumps of a successful episode
MARK_LOW: Array = np.array([-5.0, -2.0])  # [m] range of the mark
MARK_HIGH: Array = np.array([-2.0, 2.0])
MARK_RADIUS = 0.75  # [m]


class Rally(VolleyTask):
    """Keep the ball in play for 10 s: reward 1 for a bump after a high flight, 0.2 for others, -1 for a fault."""

    def evaluate_step(self, event: ContactEvent, action: Array, before: BatchState, after: BatchState) -> StepResult:
        """End the episode at a fault, or when the ball lands or leaves the court."""
        memory, xp = memory_of(after), namespace(after.qpos)
        ended = event.fault | event.landed | event.crashed | event.outside
        bumps: Array = xp.where(event.high, 1.0, LOW_BUMP) * event.bump
        reward: Array = bumps - FAULT * ended
        if self.shaped:
            reward = reward + HINT * self.dt * self.hint(after)
        last = xp.round(after.time / self.dt) >= self.max_episode_steps
        success = last & ~ended & (memory["bumps"] >= GOOD_BUMPS)
        return StepResult(reward, ended, {"success": success, "reward.bumps": bumps})

    def hint(self, state: BatchState) -> Array:
        """Shaped reward `(N,)` in [0, 1] for a drone below the ball on its turn, and for the height of the ball."""
        xp, (ball, _) = namespace(state.qpos), self.ball(state)
        drone = xp.where(self.turn(state)[..., None], self.pose(state).position, 0.0).sum(1)
        below = 1 / (1 + length(ball[:, :2] - drone[:, :2]))
        return 0.5 * below + 0.25 * xp.clip(ball[:, 2] - xp.clip(drone[:, 2], 1.0, None), 0.0, 2.0)


class Bump(Rally):
    """One drone keeps the ball up."""

    name = "volley/bump"
    anchors: Array = np.array([[3.0, 0.0, 2.0]])
    highest = 2.5
    ball_highest = 4.5

    def goal(self, state: BatchState) -> Array:
        """A point above the anchor."""
        return np.broadcast_to(self.anchors + REACH * UP, (len(state), 1, 3))


class Pass(Rally):
    """Two drones bump the ball to each other; a bump out of turn is a fault. One policy controls both."""

    name = "volley/pass"
    anchors: Array = np.array([[3.0, -1.5, 2.0], [3.0, 1.5, 2.0]])

    def goal(self, state: BatchState) -> Array:
        """A point above the other drone's anchor."""
        return np.broadcast_to(self.anchors[::-1] + REACH * UP, (len(state), 2, 3))


class Hit(VolleyTask):
    """Hit the falling ball once, over the net, so that it lands on the mark: reward 1 for success."""

    name = "volley/hit"
    anchors: Array = np.array([[3.0, 0.0, 2.0]])
    drop = 3.0
    has_target = True
    cameras = ("court", "close")

    def extra_names(self) -> tuple[str, ...]:
        """The mark, and whether the ball was hit."""
        return ("mark_x [m]", "mark_y [m]", "hit")

    def extra(self, state: BatchState) -> list[Array]:
        """The mark `(N, 2)`, and whether the ball was hit `(N, 1)`."""
        return [self.mark(state), namespace(state.qpos).clip(memory_of(state)["bumps"], None, 1.0)[:, None]]

    def extra_sign(self) -> list[float]:
        """The mark changes sides."""
        return [1.0, -1.0, 1.0]

    def draw(self, rng: np.random.Generator) -> dict[str, float]:
        """Draw the mark."""
        x, y = rng.uniform(MARK_LOW, MARK_HIGH)
        return {"target_x": x, "target_y": y}

    def initial(self, rng: np.random.Generator) -> ResetState:
        """Initial state of every drill; the ball has not crossed the net."""
        first = super().initial(rng)
        first.memory["crossed"] = 0.0
        return first

    def goal(self, state: BatchState) -> Array:
        """The mark."""
        mark = self.mark(state)[:, None]
        return np.concatenate([mark, np.full_like(mark[..., :1], BALL_RADIUS)], -1)

    def turn(self, state: BatchState) -> NDArray[np.bool_]:
        """Whether the ball has not been hit yet."""
        return memory_of(state)["bumps"][:, None] == 0

    def mark(self, state: BatchState) -> Array:
        """Target position `(N, 2)` [m] of the landing."""
        start = int(self.model.joint("target_x").qposadr[0])
        return state.qpos[:, start : start + 2]

    def evaluate_step(self, event: ContactEvent, action: Array, before: BatchState, after: BatchState) -> StepResult:
        """End the episode when the ball lands, at a second contact, or at a flight below the net."""
        memory, (old, _), (ball, _) = memory_of(after), self.ball(before), self.ball(after)
        xp, crossing = namespace(ball), (old[:, 0] > 0) & (ball[:, 0] <= 0)
        over = crossing & (xp.minimum(old[:, 2], ball[:, 2]) > NET_HEIGHT + BALL_RADIUS)
        memory["crossed"] = xp.where(over, 1.0, memory["crossed"])
        fault = event.fault | event.crashed | (event.bump & (memory["bumps"] > 1)) | (crossing & ~over)
        miss = length(ball[:, :2] - self.mark(after))
        success = event.landed & ~fault & (memory["bumps"] == 1) & (memory["crossed"] > 0) & (miss < MARK_RADIUS)
        reward = 1.0 * success - FAULT * fault
        if self.shaped:
            landed = event.landed & ~fault & (memory["bumps"] == 1)
            reward = reward + LOW_BUMP * event.bump + HINT * landed / (1 + miss)
        return StepResult(reward, fault | event.landed, {"success": success, "miss": xp.where(event.landed, miss, 0.0)})
