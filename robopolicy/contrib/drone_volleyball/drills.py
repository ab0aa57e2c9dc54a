"""The drills: keep the ball up, hit it over the net to a mark, and pass it between two drones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from robopolicy.contrib.drone_volleyball.court import FAULT, Touch, VolleyTask, recall
from robopolicy.contrib.drone_volleyball.scene import BALL_RADIUS, NET_HEIGHT, PADDLE_TOP, UP
from robopolicy.sim.backends.mujoco.task import Array, BatchState, ResetState, StepResult

REACH = PADDLE_TOP + BALL_RADIUS  # [m] from a drone's centre to that of a ball on its paddle
LOW_BUMP = 0.2  # reward of a bump; the first one, or after a flight that stayed low
HINT = 0.2  # [1/s] largest reward of a hint
GOOD_BUMPS = 6  # that make an episode without a fault a success
MARK_LOW: Array = np.array([-5.0, -2.0])  # [m] where the mark may be
MARK_HIGH: Array = np.array([-2.0, 2.0])
MARK_RADIUS = 0.75  # [m]


class Rally(VolleyTask):
    """Keep the ball in play for 10 s: 1 for a bump after a high flight, 0.2 for any other, and -1 for a fault."""

    def judge(self, touch: Touch, action: Array, before: BatchState, after: BatchState) -> StepResult:
        """A fault, and a ball that lands or leaves the court, end the episode."""
        memory = recall(after)
        ended = touch.fault | touch.landed | touch.crashed | touch.outside
        bumps: Array = np.where(touch.high, 1.0, LOW_BUMP) * touch.bump
        reward: Array = bumps - FAULT * ended
        if self.shaped:
            reward = reward + HINT * self.dt * self.hint(after)
        last = np.rint(after.time / self.dt) >= self.max_episode_steps
        success = last & ~ended & (memory["bumps"] >= GOOD_BUMPS)
        return StepResult(reward, ended, {"success": success, "reward.bumps": bumps})

    def hint(self, state: BatchState) -> Array:
        """How well the drone whose turn it is stands below the ball, and how high that is `(N,)`, from 0 to 1."""
        rows, turn = np.arange(len(state)), recall(state)["turn"].astype(np.int64)
        drone, (ball, _) = self.pose(state).position[rows, turn], self.ball(state)
        below = 1 / (1 + np.linalg.norm(ball[:, :2] - drone[:, :2], axis=1))
        return 0.5 * below + 0.25 * np.clip(ball[:, 2] - np.maximum(drone[:, 2], 1.0), 0.0, 2.0)


class Bump(Rally):
    """One drone keeps the ball up."""

    name = "volley/bump"
    anchors: Array = np.array([[3.0, 0.0, 2.0]])
    highest = 2.5
    ball_highest = 4.5

    def goal(self, state: BatchState) -> Array:
        """Above the anchor."""
        return np.broadcast_to(self.anchors + REACH * UP, (len(state), 1, 3))


class Pass(Rally):
    """Two drones bump the ball to each other; a bump out of turn is a fault. One policy flies both."""

    name = "volley/pass"
    anchors: Array = np.array([[3.0, -1.5, 2.0], [3.0, 1.5, 2.0]])

    def goal(self, state: BatchState) -> Array:
        """Above the other drone's anchor."""
        return np.broadcast_to(self.anchors[::-1] + REACH * UP, (len(state), 2, 3))


class Hit(VolleyTask):
    """Hit the falling ball once, over the net, so that it lands on the mark: 1 for success."""

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
        return [self.mark(state), np.minimum(recall(state)["bumps"], 1.0)[:, None]]

    def extra_sign(self) -> list[float]:
        """The mark lies on the other side."""
        return [1.0, -1.0, 1.0]

    def draw(self, rng: np.random.Generator) -> dict[str, float]:
        """Draw the mark."""
        x, y = rng.uniform(MARK_LOW, MARK_HIGH)
        return {"target_x": x, "target_y": y}

    def initial(self, rng: np.random.Generator) -> ResetState:
        """As in every drill; remember that the ball did not cross the net."""
        first = super().initial(rng)
        first.memory["crossed"] = 0.0
        return first

    def goal(self, state: BatchState) -> Array:
        """The mark."""
        mark = self.mark(state)[:, None]
        return np.concatenate([mark, np.full_like(mark[..., :1], BALL_RADIUS)], -1)

    def turn(self, state: BatchState) -> NDArray[np.bool_]:
        """Until it was hit."""
        return recall(state)["bumps"][:, None] == 0

    def mark(self, state: BatchState) -> Array:
        """Where the ball should land `(N, 2)` [m]."""
        start = int(self.model.joint("target_x").qposadr[0])
        return state.qpos[:, start : start + 2]

    def judge(self, touch: Touch, action: Array, before: BatchState, after: BatchState) -> StepResult:
        """The ball's landing ends the episode; so do a second touch and a flight below the net."""
        memory, (old, _), (ball, _) = recall(after), self.ball(before), self.ball(after)
        crossing = (old[:, 0] > 0) & (ball[:, 0] <= 0)
        over = crossing & (np.minimum(old[:, 2], ball[:, 2]) > NET_HEIGHT + BALL_RADIUS)
        memory["crossed"] = np.where(over, 1.0, memory["crossed"])
        fault = touch.fault | touch.crashed | (touch.bump & (memory["bumps"] > 1)) | (crossing & ~over)
        miss = np.linalg.norm(ball[:, :2] - self.mark(after), axis=1)
        success = touch.landed & ~fault & (memory["bumps"] == 1) & (memory["crossed"] > 0) & (miss < MARK_RADIUS)
        reward = 1.0 * success - FAULT * fault
        if self.shaped:
            landed = touch.landed & ~fault & (memory["bumps"] == 1)
            reward = reward + LOW_BUMP * touch.bump + HINT * landed / (1 + miss)
        return StepResult(reward, fault | touch.landed, {"success": success, "miss": np.where(touch.landed, miss, 0.0)})
