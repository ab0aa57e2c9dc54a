"""Simulator backend that replaces physics by a world model and the success check of the task by a success detector.

Episodes start from the first frames of the real simulator with the same seeds, or from logged episodes, so that both
can be compared per start. Any code that runs on a `VectorSim` runs here: evaluation, composition search, fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.episodes import Episodes
from robopolicy.data.ood_detector import OODDetector
from robopolicy.device import copy_to, move
from robopolicy.errors import UserError
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.policies.noise import assign_slots
from robopolicy.sim.contract import TERM_PREFIX, Observation, SimSpec, Step, VectorSim
from robopolicy.sim.vector_env import TorchVectorEnv
from robopolicy.worldmodel.base import DEVICE_ROWS
from robopolicy.worldmodel.contract import (
    Images,
    SuccessDetector,
    VideoWorldModel,
    WorldSpec,
    WorldState,
    first_frames,
    put_rows,
)
from robopolicy.worldmodel.videos import VideoDataset, Window, check_names

_CACHED_STARTS = 4096  # start frames in the cache


@dataclass(frozen=True)
class WorldSimConfig:
    """Rules of episodes in a world model."""

    max_episode_steps: int = 0  # control steps; 0 for the value of the task
    ends_on_success: bool = True  # whether an episode ends at predicted success
    success: float = 0.5  # probability threshold of success, where the detector does not abstain
    penalty: float = 0.0  # coefficient of the uncertainty penalty in the reward
    max_uncertainty: float = float("inf")  # an episode is truncated above it
    reward: str = "sparse"  # sparse: 1 at success | shaped: plus the gain of progress
    clip: int = 1  # last frames that the detector receives; an episode is padded with its first frame
    every: int = 1  # control steps between calls of the detector; the last step of an episode always has one


@dataclass(frozen=True)
class OODTermination:
    """Termination of episodes at actions without support in the data, where predictions are unreliable."""

    gate: OODDetector
    penalty: float = 25.0  # subtracted from the reward of the step, as its term "outside"


class InitialStates(Protocol):
    """Source of initial states."""

    def __call__(self, seeds: Sequence[int]) -> Window:
        """Return the C context frames of the R episodes `seeds`."""
        ...

    def close(self) -> None:
        """Free its resources."""
        ...


class SimInitialStates:
    """First frames of the real simulator, by episode seed."""

    def __init__(self, sim: VectorSim, spec: WorldSpec) -> None:
        """Wrap `sim`, which has one environment and provides the cameras and vectors of `spec`."""
        if sim.num_envs != 1 or not sim.spec.seeded_episodes:
            raise UserError(f"Initial states need one seeded environment, got {sim.num_envs} of {sim.spec.task}.")
        _check_world(spec, sim.spec)
        self.sim, self.spec = sim, spec
        self._cache: dict[int, Observation] = {}

    def __call__(self, seeds: Sequence[int]) -> Window:
        """Reset the simulator to each seed that is not in the cache."""
        found: list[Observation] = []
        for seed in seeds:
            if seed not in self._cache:
                if len(self._cache) == _CACHED_STARTS:
                    self._cache.pop(next(iter(self._cache)))
                self._cache[seed] = self.sim.reset([seed])
            found.append(self._cache[seed])
        images = {camera: torch.cat([obs[IMAGE_PREFIX + camera] for obs in found]) for camera in self.spec.cameras}
        vectors = [torch.cat([obs[name] for obs in found]) for name in self.spec.proprio]
        proprio = torch.cat(vectors, 1) if vectors else torch.zeros(len(seeds), 0)
        return Window(
            *first_frames(self.spec, images, proprio),
            actions=torch.zeros(len(seeds), self.spec.context - 1, self.spec.action_dim),
        )

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()


class LoggedInitialStates:
    """First frames of logged episodes: of the episode with the seed, else of the episode seed modulo N.

    With `anywhere`, episodes start at a frame drawn with the seed that has a successor and does not show success, so
    that short rollouts cover the whole task.
    """

    def __init__(self, episodes: Episodes, spec: WorldSpec, *, anywhere: bool = False) -> None:
        """Index `episodes`, which must match `spec`."""
        self._films = videos = VideoDataset(spec, episodes, "The log")
        self._index = {int(seed): index for index, seed in enumerate(episodes.seeds) if seed >= 0}
        self._anywhere: Tensor | None = None
        if anywhere:
            candidates = videos.targets - 1
            self._anywhere = candidates[videos.success[candidates] == 0]
            if not len(self._anywhere):
                raise UserError("Every frame of the log shows success, so no episode can start there.")

    def __call__(self, seeds: Sequence[int]) -> Window:
        """Return the frames of the log."""
        videos = self._films
        if self._anywhere is not None:
            draws = [int(np.random.default_rng(seed).integers(len(self._anywhere))) for seed in seeds]
            return videos.context(self._anywhere[draws])
        chosen = [self._index.get(seed, seed % videos.episodes.num_episodes) for seed in seeds]
        return videos.context(torch.from_numpy(videos.episodes.starts[chosen]))

    def close(self) -> None:
        """Do nothing; the log stays in memory."""


class WorldSim(TorchVectorEnv):
    """Vectorised simulator of N videos of a world model."""

    def __init__(
        self,
        model: VideoWorldModel,
        judge: SuccessDetector,
        starts: InitialStates,
        task: SimSpec,
        *,
        num_envs: int,
        config: WorldSimConfig | None = None,
        rows: int | None = None,
        guard: OODTermination | None = None,
    ) -> None:
        """Build N environments with the observations of the simulator `task` that `model` predicts.

        The simulator is on the device of the model. The detector `judge` receives `rows` clips per call; on the CPU, a
        fixed number, 8 by default, keeps rounding independent of N. A UserError is raised if model and task do not
        match, or the guard needs observations that the model does not predict.
        """
        self.config, self.guard = config or WorldSimConfig(), guard
        _check_world(model.spec, task)
        self.model, self.judge, self.starts = model, judge, starts
        predicted = {*model.spec.proprio, *(IMAGE_PREFIX + camera for camera in model.spec.cameras)}
        spec = replace(
            task,
            observation={key: value for key, value in task.observation.items() if key in predicted},
            max_episode_steps=self.config.max_episode_steps or task.max_episode_steps,
            seeded_episodes=True,
            supports_masked_step=True,
            final_obs_exact=True,
            mirror=None,
        )
        super().__init__(spec, num_envs, model.device)
        if guard is not None:
            blank = {key: torch.zeros(1, *entry.shape) for key, entry in spec.observation.items()}
            guard.gate.point(blank, torch.zeros(1, task.action_dim))
        self._rows = rows or (8 if self.device.type == "cpu" else DEVICE_ROWS)
        self._state: WorldState | None = None
        clip, size = self.config.clip, model.spec.size
        frames = torch.zeros(num_envs, clip, 3, size, size, dtype=torch.uint8, device=self.device)
        self._images: Images = dict.fromkeys(model.spec.cameras, frames)  # the last frames, for the detector
        self._proprio = torch.zeros(num_envs, clip, model.spec.proprio_dim, device=self.device)
        self._progress = torch.zeros(num_envs, device=self.device)
        self._clips = torch.zeros(2, dtype=torch.int64, device=self.device)  # detected, and without a decision

    @property
    def num_scored(self) -> int:
        """Number of clips since the last reset."""
        return int(self._clips[0])

    @property
    def num_abstained(self) -> int:
        """Number of clips since the last reset without a decision."""
        return int(self._clips[1])

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start a new episode in every environment."""
        self._clips = torch.zeros_like(self._clips)
        return super().reset(seed)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Predict one frame of every active video and evaluate it."""
        assert self._state is not None, "reset first"
        config = self.config
        active, command = self.active_rows(active), self.clipped_action(action)
        rows = self._selected(active)
        uncertainty, outside = torch.zeros_like(self._progress), torch.zeros_like(active)
        if len(rows):
            actions = command[rows]
            if self.guard is not None:
                obs = {key: value[rows] for key, value in self.observe().items()}
                beyond = ~self.guard.gate.inside(self.guard.gate.point(obs, actions))
                outside = put_rows(outside, rows, beyond, active)
            state, frames = self.model.step(self._state.select(rows), actions[:, None])
            self._state = self._state.put(rows, state, active)
            self._append(active, rows, frames.images, frames.proprio)
            uncertainty = put_rows(uncertainty, rows, frames.uncertainty[:, -1], active)
        self.episode_step = self.episode_step + active
        last = (uncertainty > config.max_uncertainty) | (self.episode_step >= self.spec.max_episode_steps)
        success, progress, abstained = self._detect(active & (last | (self.episode_step % config.every == 0)))
        success = success & ~outside
        reward = success.float() - config.penalty * uncertainty
        if config.reward == "shaped":
            reward = reward + progress - self._progress
        self._progress = progress
        info = {"success": success, "uncertainty": uncertainty, "progress": progress, "abstained": abstained}
        if self.guard is not None:
            info[TERM_PREFIX + "outside"] = -self.guard.penalty * outside.float()
            reward = reward + info[TERM_PREFIX + "outside"]
        terminated = (success & config.ends_on_success) | outside
        truncated = active & ~terminated & last
        final = self.observe()
        return Step(
            obs=self.observe() if self.restart(terminated | truncated) else final,
            reward=torch.where(active, reward, 0.0),
            terminated=terminated,
            truncated=truncated,
            final_obs=final,
            info=info,
        )

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return the predicted frames, scaled to the height and centred."""
        name = camera or self.model.spec.cameras[0]
        if name not in self._images:
            raise UserError(f"The world model has the cameras {sorted(self._images)}, not '{name}'.")
        side = min(width, height)
        view = torch.nn.functional.interpolate(self._images[name][:envs, -1].float(), size=(side, side))
        picture = torch.zeros(len(view), 3, height, width, dtype=torch.uint8)
        top, left = (height - side) // 2, (width - side) // 2
        picture[..., top : top + side, left : left + side] = view.to(torch.uint8)
        return picture

    def close(self) -> None:
        """Close the source of initial states."""
        self.starts.close()

    def state_dict(self) -> dict[str, Any]:
        """State of all videos."""
        assert self._state is not None, "reset first"
        return super().state_dict() | {
            "films": {"seeds": self._state.seeds, "steps": self._state.steps, "memory": dict(self._state.memory)},
            "images": dict(self._images),
            "proprio": self._proprio,
            "progress": self._progress,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        videos, images, proprio, progress = (
            move(state[name], self.device) for name in ("films", "images", "proprio", "progress")
        )
        self._state = WorldState(videos["seeds"], videos["steps"], videos["memory"])
        self._images, self._proprio, self._progress = images, proprio, progress
        return super().load_state_dict(state)

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Start the videos of `rows`."""
        start = self.starts(seeds)
        state = self.model.reset(start.images, start.proprio, seeds=torch.tensor(seeds), actions=start.actions)
        rows = copy_to(rows, self.device)
        started = torch.zeros_like(self.episode_step, dtype=torch.bool).index_fill(0, rows, True)
        self._state = (
            state if self._state is None or len(rows) == self.num_envs else self._state.put(rows, state, started)
        )
        before = self.config.clip  # copies of the first frame replace the frames of the last episode
        images = {camera: _padded(view, before) for camera, view in start.images.items()}
        self._append(started, rows, images, _padded(start.proprio, before))
        found = self._detect(started)[1] if self.config.reward == "shaped" else torch.zeros_like(self._progress)
        self._progress = torch.where(started, found, self._progress)

    def _selected(self, mask: Tensor) -> Tensor:
        """Return the rows of `mask` `(N,)`; on a device all rows, because finding them would wait."""
        if self.device.type == "cpu":
            return mask.nonzero().flatten()
        return torch.arange(self.num_envs, device=self.device)

    def _append(self, active: Tensor, rows: Tensor, images: Images, proprio: Tensor) -> None:
        """Append frames of `rows` `(R, T, ...)` to the active videos, without changing tensors returned before."""

        def appended(video: Tensor, frames: Tensor) -> Tensor:
            frames = copy_to(frames.to(video.dtype), self.device)
            return put_rows(video, rows, torch.cat([video[rows], frames], 1)[:, -video.shape[1] :], active)

        self._images = {camera: appended(video, images[camera]) for camera, video in self._images.items()}
        self._proprio = appended(self._proprio, proprio)

    def _detect(self, due: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return success, progress and abstention `(N,)` where `due` `(N,)`, elsewhere False, the last one and False.

        Calls have a fixed number of clips. On a device, a detector that is called in every step receives all rows.
        """
        rows = self._selected(due) if self.config.every == 1 else due.nonzero().flatten()
        none = torch.zeros_like(due)
        if not len(rows):
            return none, self._progress, none
        if self.device.type == "cpu":
            calls = assign_slots(self.episode_seed[rows].tolist(), self._rows)
            parts = [[part[call.places] for part in self._judge_clips(rows[call.members])] for call in calls]
            order = torch.tensor([index for call in calls for index in call.seated]).argsort()
            success, progress, unsure = (torch.cat(column)[order] for column in zip(*parts, strict=True))
        else:
            batches = [self._judge_clips(members) for members in rows.split(self._rows)]
            success, progress, unsure = (torch.cat(column) for column in zip(*batches, strict=True))
        sure = put_rows(none, rows, (success >= self.config.success) & ~unsure, due)
        abstained = put_rows(none, rows, unsure, due)
        self._clips = self._clips + torch.stack([due.sum(), abstained.sum()])
        return sure, put_rows(self._progress, rows, progress, due), abstained

    def _judge_clips(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return probabilities of success, progress and abstention `(R,)` of `rows` from one call of the detector."""
        found = self.judge({camera: view[rows] for camera, view in self._images.items()}, self._proprio[rows])
        return found.success.to(self.device), found.progress.to(self.device).float(), found.uncertain.to(self.device)

    def observe(self) -> Observation:
        """Return the state vectors and frames."""
        names = self.model.spec.proprio
        sizes = [int(np.prod(self.spec.observation[name].shape)) for name in names]
        vectors = dict(zip(names, self._proprio[:, -1].split(sizes, 1), strict=True)) if names else {}
        return vectors | {IMAGE_PREFIX + camera: video[:, -1] for camera, video in self._images.items()}


def _padded(frames: Tensor, count: int) -> Tensor:
    """Prepend `count` copies of the first frame to `frames` `(R, T, ...)`."""
    return torch.cat([frames[:, :1].expand(-1, count, *frames.shape[2:]), frames], 1)


def _check_world(world: WorldSpec, task: SimSpec) -> None:
    """Raise a UserError for a task whose observations, actions or rate do not match the world model."""
    if world.action_dim != task.action_dim:
        raise UserError(
            f"The world model takes {world.action_dim} action dimensions, but {task.task} {task.action_dim}."
        )
    if not np.isclose(world.fps, 1 / task.control_dt, rtol=0.05):
        raise UserError(
            f"The world model runs at {world.fps:g} Hz, but {task.task} acts at {1 / task.control_dt:g} Hz."
        )
    for key, shape in {IMAGE_PREFIX + camera: (3, world.size, world.size) for camera in world.cameras}.items():
        found = tuple(task.observation[key].shape) if key in task.observation else "nothing"
        if found != shape:
            raise UserError(f"The world model predicts '{key}' of shape {shape}, but {task.task} has {found}.")
    missing = [name for name in world.proprio if name not in task.observation]
    if missing:
        raise UserError(f"The world model predicts '{missing[0]}', which {task.task} does not have.")
    size = sum(int(np.prod(task.observation[name].shape)) for name in world.proprio)
    if size != world.proprio_dim:
        raise UserError(f"State vectors of the world model have {world.proprio_dim} entries, but the task has {size}.")
    names = {key: entry.names for key, entry in task.observation.items()} | {"action": task.action_names}
    check_names(world, task.task, names)
