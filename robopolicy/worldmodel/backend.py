"""A world model as one more simulator: what is learnt takes the place of physics, and a judge that of the task's rules.

Episodes start where those of the real simulator with the same seeds do, or in logged episodes; so both can be compared
start by start. Everything that plays on a `VectorSim` plays here: evaluation, composition searches, fine-tuning.
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
from robopolicy.errors import UserError
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.policies.noise import assign_slots
from robopolicy.sim.contract import TERM_PREFIX, Observation, SimSpec, Step, VectorSim
from robopolicy.sim.vector_env import TorchVectorEnv
from robopolicy.worldmodel.contract import Images, SuccessDetector, VideoWorldModel, WorldSpec, WorldState, first_frames
from robopolicy.worldmodel.videos import VideoDataset, Window, check_names

_KEPT = 4096  # start frames remembered


@dataclass(frozen=True)
class WorldSimConfig:
    """Rules of episodes in a world model."""

    max_episode_steps: int = 0  # control steps; 0 is as many as the task has
    ends_on_success: bool = True  # whether an episode ends when the judge sees success
    success: float = 0.5  # least probability of success that counts, where the judge does not abstain
    penalty: float = 0.0  # taken off the reward per unit of the model's uncertainty
    max_uncertainty: float = float("inf")  # an episode is cut where the model is less certain
    reward: str = "sparse"  # sparse: 1 at success | shaped: gain of progress on top of that
    clip: int = 1  # last frames that the judge is shown, the first one of an episode repeated
    every: int = 1  # control steps between judgements; the last step of an episode is always judged


@dataclass(frozen=True)
class OODTermination:
    """Ends episodes whose action has no support in the data where it is played: what the model says then is a guess."""

    gate: OODDetector
    penalty: float = 25.0  # taken off the reward of the step, as its part "outside"


class InitialStates(Protocol):
    """Where episodes begin."""

    def __call__(self, seeds: Sequence[int]) -> Window:
        """The C frames of the R episodes `seeds` that come before their first prediction."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


class SimInitialStates:
    """The first frames of the real simulator, by episode seed."""

    def __init__(self, sim: VectorSim, spec: WorldSpec) -> None:
        """Take starts from `sim`, which has one environment and shows the cameras and vectors of `spec`.

        Raises:
            UserError: It shows something else.
        """
        if sim.num_envs != 1 or not sim.spec.seeded_episodes:
            raise UserError(f"Starts come from one seeded environment, got {sim.num_envs} of {sim.spec.task}.")
        _check_world(spec, sim.spec)
        self.sim, self.spec = sim, spec
        self._kept: dict[int, Observation] = {}

    def __call__(self, seeds: Sequence[int]) -> Window:
        """Reset the simulator to each seed; a start that was seen lately is remembered."""
        found: list[Observation] = []
        for seed in seeds:
            if seed not in self._kept:
                if len(self._kept) == _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[seed] = self.sim.reset([seed])
            found.append(self._kept[seed])
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
    """The first frames of logged episodes: those of the seed where one was logged, else the seed-th, counted around.

    With `anywhere` episodes start in the middle of the logged ones, in a frame drawn by the seed that another frame
    follows and that does not show success: short rollouts then see all of a task, not its beginning alone.
    """

    def __init__(self, episodes: Episodes, spec: WorldSpec, *, anywhere: bool = False) -> None:
        """Take starts from `episodes`, which must show the world of `spec`."""
        self._films = films = VideoDataset(spec, episodes, "The log")
        self._index = {int(seed): index for index, seed in enumerate(episodes.seeds) if seed >= 0}
        self._anywhere: Tensor | None = None
        if anywhere:
            played = films.targets - 1
            self._anywhere = played[films.success[played] == 0]
            if not len(self._anywhere):
                raise UserError("Every frame of the log shows success, so no episode can start there.")

    def __call__(self, seeds: Sequence[int]) -> Window:
        """Look the frames up."""
        films = self._films
        if self._anywhere is not None:
            draws = [int(np.random.default_rng(seed).integers(len(self._anywhere))) for seed in seeds]
            return films.context(self._anywhere[draws])
        chosen = [self._index.get(seed, seed % films.episodes.num_episodes) for seed in seeds]
        return films.context(torch.from_numpy(films.episodes.starts[chosen]))

    def close(self) -> None:
        """Nothing to free."""


class WorldSim(TorchVectorEnv):
    """N films of a world model, stepped together."""

    def __init__(
        self,
        model: VideoWorldModel,
        judge: SuccessDetector,
        starts: InitialStates,
        task: SimSpec,
        *,
        num_envs: int,
        config: WorldSimConfig | None = None,
        rows: int = 8,
        guard: OODTermination | None = None,
    ) -> None:
        """Build N environments.

        Args:
            model: The world model; it must predict whatever of the task's observations a policy is to see.
            judge: Says when the task is solved.
            starts: Where episodes begin.
            task: The real simulator's specification: observations, bounds of the actions, length of an episode.
            num_envs: N.
            config: Rules of the episodes.
            rows: Clips per call of the judge; a fixed number keeps rounding independent of N.
            guard: Ends what leaves the data.

        Raises:
            UserError: Model and task do not belong together, or the guard knows what the model does not show.
        """
        self.config, self.guard = config or WorldSimConfig(), guard
        _check_world(model.spec, task)
        self.model, self.judge, self.starts = model, judge, starts
        shown = {*model.spec.proprio, *(IMAGE_PREFIX + camera for camera in model.spec.cameras)}
        spec = replace(
            task,
            observation={key: value for key, value in task.observation.items() if key in shown},
            max_episode_steps=self.config.max_episode_steps or task.max_episode_steps,
            seeded_episodes=True,
            supports_masked_step=True,
            final_obs_exact=True,
            mirror=None,
        )
        super().__init__(spec, num_envs)
        if guard is not None:
            blank = {key: torch.zeros(1, *shown.shape) for key, shown in spec.observation.items()}
            guard.gate.point(blank, torch.zeros(1, task.action_dim))
        self._rows = rows
        self._state: WorldState | None = None
        clip, size = self.config.clip, model.spec.size
        frames = torch.zeros(num_envs, clip, 3, size, size, dtype=torch.uint8)
        self._images: Images = dict.fromkeys(model.spec.cameras, frames)  # the last frames, as the judge sees them
        self._proprio = torch.zeros(num_envs, clip, model.spec.proprio_dim)
        self._progress = torch.zeros(num_envs)
        self.judged = self.abstained = 0  # clips since the last reset, and those of them on which the judge abstained

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start every environment anew."""
        self.judged = self.abstained = 0
        return super().reset(seed)

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Let the model predict one frame of every active film, and judge it."""
        assert self._state is not None, "reset first"
        config, count = self.config, self.num_envs
        active, command = self.active_rows(active), self.clipped_action(action)
        rows = active.nonzero().flatten()
        success, abstained = torch.zeros(2, count, dtype=torch.bool)
        progress, uncertainty = self._progress.clone(), torch.zeros(count)
        outside = torch.zeros(count, dtype=torch.bool)
        if len(rows):
            played = command[rows]
            if self.guard is not None:
                seen = {key: value[rows] for key, value in self.observe().items()}
                outside[rows] = ~self.guard.gate.inside(self.guard.gate.point(seen, played))
            state, frames = self.model.step(self._state.select(rows), played[:, None])
            self._state = self._state.put(rows, state)
            self._show(rows, frames.images, frames.proprio)
            uncertainty[rows] = frames.uncertainty[:, -1].cpu().float()
        self.episode_step = self.episode_step + active
        last = (uncertainty > config.max_uncertainty) | (self.episode_step >= self.spec.max_episode_steps)
        due = (active & (last | (self.episode_step % config.every == 0))).nonzero().flatten()
        success[due], progress[due], abstained[due] = self._judged(due)
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
        ended = terminated | truncated
        self.restart(ended)
        return Step(
            obs=self.observe() if bool(ended.any()) else final,
            reward=torch.where(active, reward, 0.0),
            terminated=terminated,
            truncated=truncated,
            final_obs=final,
            info=info,
        )

    def render(self, camera: str | None = None, *, width: int = 320, height: int = 240, envs: int = 1) -> Tensor:
        """Return the predicted frames, enlarged to the height and centred."""
        name = camera or self.model.spec.cameras[0]
        if name not in self._images:
            raise UserError(f"The world model shows the cameras {sorted(self._images)}, not '{name}'.")
        side = min(width, height)
        view = torch.nn.functional.interpolate(self._images[name][:envs, -1].float(), size=(side, side))
        picture = torch.zeros(len(view), 3, height, width, dtype=torch.uint8)
        top, left = (height - side) // 2, (width - side) // 2
        picture[..., top : top + side, left : left + side] = view.to(torch.uint8)
        return picture

    def close(self) -> None:
        """Close what the episodes start from."""
        self.starts.close()

    def state_dict(self) -> dict[str, Any]:
        """The films as far as they go."""
        assert self._state is not None, "reset first"
        return super().state_dict() | {
            "films": {"seeds": self._state.seeds, "steps": self._state.steps, "memory": dict(self._state.memory)},
            "images": dict(self._images),
            "proprio": self._proprio,
            "progress": self._progress,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        films = state["films"]
        memory = {key: value.to(self.model.device) for key, value in films["memory"].items()}
        self._state = WorldState(films["seeds"].clone(), films["steps"].clone(), memory)
        self._images = {camera: view.clone() for camera, view in state["images"].items()}
        self._proprio, self._progress = state["proprio"].clone(), state["progress"].clone()
        return super().load_state_dict(state)

    def start_episodes(self, rows: Tensor, seeds: list[int]) -> None:
        """Begin films."""
        start = self.starts(seeds)
        state = self.model.reset(start.images, start.proprio, seeds=torch.tensor(seeds), actions=start.actions)
        self._state = state if self._state is None or len(rows) == self.num_envs else self._state.put(rows, state)
        before = self.config.clip  # copies of the first frame, so that nothing of the last episode stays
        images = {camera: _padded(view, before) for camera, view in start.images.items()}
        self._show(rows, images, _padded(start.proprio, before))
        self._progress = self._progress.clone()
        self._progress[rows] = self._judged(rows)[1] if self.config.reward == "shaped" else 0.0

    def _show(self, rows: Tensor, images: Images, proprio: Tensor) -> None:
        """Append frames `(R, T, ...)` to those of `rows`; what was handed out before stays as it is."""
        self._images = {camera: _appended(film, rows, images[camera]) for camera, film in self._images.items()}
        self._proprio = _appended(self._proprio, rows, proprio)

    def _judged(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Success, progress and abstention `(R,)` for what `rows` show, a fixed number of clips at a time."""
        success, abstained = torch.zeros(2, len(rows), dtype=torch.bool)
        progress = torch.zeros(len(rows))
        for call in assign_slots(self.episode_seed[rows].tolist(), self._rows):
            members = rows[call.members]
            clips = {camera: view[members] for camera, view in self._images.items()}
            judgement = self.judge(clips, self._proprio[members])
            sure = (judgement.success >= self.config.success) & ~judgement.uncertain
            success[call.seated] = sure[call.places].cpu()
            progress[call.seated] = judgement.progress[call.places].cpu().float()
            abstained[call.seated] = judgement.uncertain[call.places].cpu()
        self.judged += len(rows)
        self.abstained += int(abstained.sum())
        return success, progress, abstained

    def observe(self) -> Observation:
        """State vectors and frames."""
        names = self.model.spec.proprio
        sizes = [int(np.prod(self.spec.observation[name].shape)) for name in names]
        seen = dict(zip(names, self._proprio[:, -1].split(sizes, 1), strict=True)) if names else {}
        return seen | {IMAGE_PREFIX + camera: film[:, -1] for camera, film in self._images.items()}


def _appended(film: Tensor, rows: Tensor, frames: Tensor) -> Tensor:
    """A copy of `film` `(N, K, ...)` with `frames` `(R, T, ...)` after those of `rows`; the last K are kept."""
    film = film.clone()
    film[rows] = torch.cat([film[rows], frames.to(film.device, film.dtype)], 1)[:, -film.shape[1] :]
    return film


def _padded(frames: Tensor, count: int) -> Tensor:
    """`frames` `(R, T, ...)` after `count` copies of the first."""
    return torch.cat([frames[:, :1].expand(-1, count, *frames.shape[2:]), frames], 1)


def _check_world(world: WorldSpec, task: SimSpec) -> None:
    """Refuse a task whose observations, actions or rate are not those of the world model.

    Raises:
        UserError: Says what differs.
    """
    if world.action_dim != task.action_dim:
        raise UserError(
            f"The world model takes {world.action_dim} action dimensions, but {task.task} {task.action_dim}."
        )
    if not np.isclose(world.fps, 1 / task.control_dt, rtol=0.05):
        raise UserError(
            f"The world model runs at {world.fps:g} Hz, but {task.task} acts at {1 / task.control_dt:g} Hz."
        )
    wanted = {IMAGE_PREFIX + camera: (3, world.size, world.size) for camera in world.cameras}
    for key, shape in wanted.items():
        found = tuple(task.observation[key].shape) if key in task.observation else "nothing"
        if found != shape:
            raise UserError(f"The world model shows '{key}' of shape {shape}, but {task.task} has {found}.")
    missing = [name for name in world.proprio if name not in task.observation]
    if missing:
        raise UserError(f"The world model predicts '{missing[0]}', which {task.task} does not have.")
    size = sum(int(np.prod(task.observation[name].shape)) for name in world.proprio)
    if size != world.proprio_dim:
        raise UserError(f"State vectors of the world model have {world.proprio_dim} entries, those of the task {size}.")
    names = {key: shown.names for key, shown in task.observation.items()} | {"action": task.action_names}
    check_names(world, task.task, names)
