"""Vector-simulator contract between backends and their users.

A backend that passes `robopolicy.sim.checker.check_simulator` supports training, evaluation, composition and deployment
without further code. Rules that the other packages depend on:

* **Same-step autoreset.** When an episode ends inside `step`, `Step.obs` is already the first observation of the next
  episode and `Step.final_obs` is the true last observation of the one that ended.
* **Terminated cuts the bootstrap; truncated bootstraps from `final_obs`; both cut the trace.** Both flags may be set;
  terminated then wins.
* **Seeds.** `reset(seed=s)` starts environment i with episode seed `s + i`; every later automatic reset takes the next
  unused integer, in order of environment index. An episode is a function of its seed and its actions, so results do
  not depend on the number of environments. `episode_seed` is the seed of the current episode of each environment.
* **Actions** are clipped to `[action_low, action_high]` by the backend; both are finite.
* **Everything is a tensor** on `device`; returned tensors are never overwritten by a later call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry
from robopolicy.sim.physics_state import PhysicsState

LOG_PREFIX = "log."
"""Prefix of keys of `Step.info` that a simulator logs for episodes that end in the step, e.g. reward terms."""

TERM_PREFIX = "reward."
"""Prefix of keys of `Step.info` with reward terms `(N,)`; the remainder of the reward counts as one more term."""

UNDISCOUNTED_PREFIX = "undiscounted."
"""Prefix in `ChunkStep.info` of the undiscounted sums of these terms over a chunk."""

Observation = dict[str, Tensor]
"""Flat mapping from a key to a tensor with leading dimension `num_envs`.

Float vectors are `float32` in SI units under keys such as `state`; camera images are `uint8` `(N, 3, height, width)`
under keys `image.<camera>`, point clouds `float32` `(N, points, 3)` in metres under keys `point_cloud.<camera>`.
"""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one observation key, without the leading environment dimension."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    names: tuple[str, ...] = ()  # one name per element of a vector, with units, e.g. "panda_joint1 [rad]"


@dataclass(frozen=True)
class SimSpec:
    """Static properties of a simulator that policies, datasets and checkpoints need."""

    task: str  # registered task id
    observation: Mapping[str, TensorSpec]
    action_low: Tensor  # (A,) float32, finite
    action_high: Tensor  # (A,) float32, finite
    control_dt: float  # seconds between two actions
    max_episode_steps: int  # control steps after which an episode is truncated
    action_names: tuple[str, ...] = ()
    seeded_episodes: bool = True  # False where the backend cannot follow the seed rule (EnvPool)
    supports_masked_step: bool = True  # False where the backend cannot skip rows; see `VectorSim.reset_rows`
    final_obs_exact: bool = True  # False where the last observation is unknown; `final_obs` is the previous one
    mirror: MirrorSymmetry | None = None  # left-right symmetry of the task, if any
    action_type: str = ""  # absolute | delta: actions are targets of a controller or changes; empty if unknown
    success_step: str = "any"  # steps of an episode whose success an evaluation counts: any | last
    num_problems: int | None = None  # different episodes, each evaluated at most once; None: they do not repeat

    @property
    def action_dim(self) -> int:
        """Number of action dimensions A."""
        return int(self.action_low.shape[0])


@dataclass(frozen=True)
class Step:
    """Result of one control step of all environments."""

    obs: Observation  # (N, ...) observation to act on next, after automatic reset
    reward: Tensor  # (N,) float32
    terminated: Tensor  # (N,) bool, a terminal state was reached
    truncated: Tensor  # (N,) bool, the episode was truncated (time limit)
    final_obs: Observation  # (N, ...) true successor observation; equals `obs` where the episode continues
    info: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """(N, ...); `success` (N,) bool where the task defines it, `diverged` (N,) bool where the backend detects that the
    physics diverged: the episode is terminated, the reward is 0, `final_obs` is its last finite observation; `ended`
    (N,) bool in a simulator that continues after success: whether the step would have ended the episode."""

    @property
    def done(self) -> Tensor:
        """(N,) bool, terminated or truncated."""
        return self.terminated | self.truncated


class VectorSim(ABC):
    """Batch of environments that are stepped together. See the module docstring for the rules."""

    spec: SimSpec
    num_envs: int
    device: torch.device
    episode_seed: Tensor  # (N,) int64, seed of the current episode
    episode_step: Tensor  # (N,) int64, control steps in the current episode

    @abstractmethod
    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset every environment; environment i runs episode `seed + i`, or `seed[i]` for a sequence."""

    @abstractmethod
    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Apply `action` `(N, A)` for one control step.

        Rows where `active` `(N,)` bool is False do not move: their state, seed and step count do not change, their
        reward is 0 and both flags are False. Action chunks need it, since episodes end at different steps of a chunk.
        """

    def reset_rows(self, ended: Tensor) -> tuple[Observation, dict[str, Tensor]]:
        """Start the next episodes of the rows `ended` `(N,)` after a chunk, where `supports_masked_step` is False.

        There, a step with `active` resets no row: `obs` of a row that ends equals its `final_obs`, and it moves in the
        remaining steps of the chunk with reward 0, both flags False, and an unchanged step count. Returns the
        observations of all rows, and entries `log.*` of the episodes that ended.
        """
        raise UserError(
            f"{type(self).__name__} of task {self.spec.task} executes one action per decision; "
            "set chunk.action_horizon=1."
        )

    def goal_reward(self, achieved: Tensor, desired: Tensor) -> Tensor:
        """Rewards `(B,)` of reaching the goals `achieved` where `desired` is wanted, both `(B, G)`.

        Tasks with goals observe `achieved_goal` and `desired_goal`; others raise a `UserError`.
        """
        raise UserError(f"Task {self.spec.task} has no goals in hindsight; set replay.hindsight.strategy=none.")

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return frames `(envs, 3, height, width)` uint8 of the first `envs` environments."""
        raise RuntimeError(f"Task {self.spec.task} cannot render images.")

    def physics_state(self, env: int = 0) -> PhysicsState | None:
        """Return the state of the bodies of environment `env`; None where the backend has none to show."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state (tensors, arrays, numbers) for exact resume."""
        raise RuntimeError(f"{type(self).__name__} cannot save its state; resume starts fresh episodes.")

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict` and return the observation to act on next."""
        raise RuntimeError(f"{type(self).__name__} cannot restore its state; resume starts fresh episodes.")

    def close(self) -> None:
        """Free threads, contexts and files; safe to call twice."""
