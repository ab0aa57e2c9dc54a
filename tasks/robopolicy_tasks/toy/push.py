"""Disc that pushes another disc to a target: the smallest task with contact and a camera.

Environments are rows of a few torch tensors, and the camera is rendered in torch, so that thousands of videos take
seconds. The red gripper moves at the commanded velocity and pushes the blue block away without sliding. An episode
succeeds and ends when the centre of the block is within 8 cm of the green mark.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry, SignedPermutation
from robopolicy.sim.contract import Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.registry import SimOptions
from robopolicy.sim.vector_env import TorchVectorEnv

DT = 0.1  # seconds per control step
MAX_SPEED = 0.7  # [m/s] of the gripper, along each axis
GRIPPER, BLOCK, MARK = 0.06, 0.09, 0.14  # [m] radii
GOAL = (0.75, 0.0)  # [m] centre of the mark; the table spans x in [0, 1] and y in [-0.5, 0.5]
RADIUS = 0.08  # [m] maximum distance from the goal for success
LOW, HIGH = (0.02, -0.48), (0.98, 0.48)  # [m] range of centres
CAMERA = "top"
COLOURS = {"table": (217, 217, 217), "mark": (153, 230, 153), "block": (51, 76, 204), "gripper": (217, 51, 51)}


class PushSim(TorchVectorEnv):
    """N tables, stepped and rendered in torch."""

    def __init__(self, options: SimOptions) -> None:
        """Build `options.num_envs` tables; `options.cameras` may contain "top"."""
        if set(options.cameras) - {CAMERA} or options.point_clouds:
            raise UserError(
                f"Task toy/push has only the camera '{CAMERA}', got {[*options.cameras]}; remove the others."
            )
        self._renders, self._size = bool(options.cameras), options.image_size
        observation = {
            "gripper": TensorSpec((2,), names=("gripper_x [m]", "gripper_y [m]")),
            "block": TensorSpec((2,), names=("block_x [m]", "block_y [m]")),
        }
        image = TensorSpec((3, options.image_size, options.image_size), torch.uint8)
        spec = SimSpec(
            task="toy/push",
            observation=observation | ({f"image.{CAMERA}": image} if self._renders else {}),
            action_low=-torch.full((2,), MAX_SPEED),
            action_high=torch.full((2,), MAX_SPEED),
            control_dt=DT,
            max_episode_steps=40,
            action_names=("gripper_vx [m/s]", "gripper_vy [m/s]"),
            mirror=None
            if self._renders
            else MirrorSymmetry(
                {key: SignedPermutation.of([1, -1]) for key in observation}, SignedPermutation.of([1, -1])
            ),
        )
        super().__init__(spec, options.num_envs, options.device)
        self._shaped, self._ends_on_success = options.reward == "shaped", options.ends_on_success
        self._gripper = torch.zeros(self.num_envs, 2, device=self.device)
        self._block = torch.zeros(self.num_envs, 2, device=self.device)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Move the grippers for one control step."""
        active = self.active_rows(active)
        before = _distance(self._block)
        gripper, block = push(self._gripper, self._block, self.clipped_action(action))
        self._gripper = torch.where(active[:, None], gripper, self._gripper)
        self._block = torch.where(active[:, None], block, self._block)
        self.episode_step = self.episode_step + active
        distance = _distance(self._block)
        success = active & solved(self._block)
        terminated = success & self._ends_on_success
        truncated = active & ~terminated & (self.episode_step >= self.spec.max_episode_steps)
        reward = success.float() + (before - distance if self._shaped else 0.0)
        final = self.observe()
        obs = self.observe() if self.restart(terminated | truncated) else final
        info = {"success": success} | ({} if self._ends_on_success else {"ended": success})
        return Step(obs, torch.where(active, reward, 0.0), terminated, truncated, final, info)

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames of the first `envs` tables, from above; the table fills the height."""
        if camera not in (None, CAMERA):
            raise UserError(f"Task toy/push has only the camera '{CAMERA}', not '{camera}'.")
        return render_tables(self._gripper[:envs], self._block[:envs], height, width)

    def observe(self) -> Observation:
        """Positions, and the image if requested."""
        observation = {"gripper": self._gripper.clone(), "block": self._block.clone()}
        if self._renders:
            observation[f"image.{CAMERA}"] = render_tables(self._gripper, self._block, self._size, self._size)
        return observation

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Sample positions of grippers and blocks."""
        low, high = (0.05, -0.4, 0.3, -0.25), (0.2, 0.4, 0.5, 0.25)
        starts = np.stack([np.random.default_rng(seed).uniform(low, high) for seed in seeds])
        self._gripper = self.replaced(self._gripper, rows, starts[:, :2])
        self._block = self.replaced(self._block, rows, starts[:, 2:])

    def state_dict(self) -> dict[str, Any]:
        """Positions, counters and seeds."""
        return super().state_dict() | {"gripper": self._gripper.cpu(), "block": self._block.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        self._gripper, self._block = (state[key].to(self.device, copy=True) for key in ("gripper", "block"))
        return super().load_state_dict(state)


def push(gripper: Tensor, block: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Positions `(N, 2)` [m] of gripper and block after one control step of `action` `(N, 2)` [m/s]."""
    low, high = _constant(LOW, gripper), _constant(HIGH, gripper)
    gripper = (gripper + DT * action.clamp(-MAX_SPEED, MAX_SPEED)).clamp(low, high)
    offset = block - gripper
    distance = offset.norm(dim=1, keepdim=True).clamp(min=1e-6)
    overlap = (GRIPPER + BLOCK - distance).clamp(min=0.0)
    return gripper, (block + offset / distance * overlap).clamp(low, high)


def render_tables(gripper: Tensor, block: Tensor, height: int, width: int) -> Tensor:
    """Images `(N, 3, height, width)` uint8 of the table from above, x to the right and y upwards."""
    rows = 0.5 - (torch.arange(height, device=gripper.device) + 0.5) / height
    columns = 0.5 + ((torch.arange(width, device=gripper.device) + 0.5) - width / 2) / height
    image = _constant(COLOURS["table"], gripper)[None, :, None, None].repeat(len(gripper), 1, height, width)
    goal = _constant(GOAL, gripper).expand_as(gripper)
    for name, centre, radius in (("mark", goal, MARK), ("block", block, BLOCK), ("gripper", gripper, GRIPPER)):
        square = (columns - centre[:, :1])[:, None, :] ** 2 + (rows - centre[:, 1:])[:, :, None] ** 2  # (N, h, w)
        cover = ((radius - square.sqrt()) * height + 0.5).clamp(0.0, 1.0)[:, None]  # edges one pixel wide
        colour = _constant(COLOURS[name], gripper)[:, None, None]
        image = image * (1 - cover) + colour * cover
    return image.round().to(torch.uint8)


class PushExpert:
    """Expert that moves around the block to its far side, then pushes it to the mark."""

    def __call__(self, sim: VectorSim, obs: Observation) -> Tensor:
        """Return velocities `(N, 2)`."""
        return steer(obs["gripper"], obs["block"])


def steer(gripper: Tensor, block: Tensor) -> Tensor:
    """Velocities `(..., 2)` [m/s] that move the block to the mark."""
    goal = _constant(GOAL, gripper)
    ahead = _unit(goal - block)  # direction of the push
    left = torch.stack([-ahead[..., 1], ahead[..., 0]], -1)
    reach = block - gripper
    behind = (_unit(reach) * ahead).sum(-1, keepdim=True) > 0.93
    passed = (reach * ahead).sum(-1, keepdim=True) < 0.05  # the gripper is at the side of the block or beyond it
    side = torch.where((reach * left).sum(-1, keepdim=True) > 0, -1.0, 1.0)
    around = block + side * 0.25 * left - 0.1 * ahead
    target = torch.where(behind, goal, torch.where(passed, around, block - (GRIPPER + BLOCK + 0.04) * ahead))
    velocity = (target - gripper) / DT
    return velocity * (MAX_SPEED / velocity.abs().amax(-1, keepdim=True).clamp(min=MAX_SPEED))


def solved(block: Tensor) -> Tensor:
    """Whether blocks `(N, 2)` [m] are at the goal `(N,)`."""
    return _distance(block) < RADIUS


def _distance(block: Tensor) -> Tensor:
    return (block - _constant(GOAL, block)).norm(dim=1)


def _constant(values: tuple[float, ...], like: Tensor) -> Tensor:
    """`values` with the type and device of `like`, uploaded once; do not write to it."""
    return _uploaded(values, like.dtype, like.device)


@cache
@torch.inference_mode(False)
def _uploaded(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _unit(vector: Tensor) -> Tensor:
    return vector / vector.norm(dim=-1, keepdim=True).clamp(min=1e-6)
