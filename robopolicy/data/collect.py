"""Collection of demonstrations from scripted experts or policies, episode by episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.episodes import Episode
from robopolicy.errors import SimulatorFailed, UserError
from robopolicy.plurals import counted
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.sim.contract import Observation, Step, VectorSim
from robopolicy.sim.registry import Expert
from robopolicy.sim.wrappers.base import unwrapped

_MIN_SUCCESS_RATE = 0.05  # collection stops below this rate
_MIN_ATTEMPTS = 100  # attempted episodes before the rate is checked
_NOISE_KEY_OFFSET = 1 << 42  # added to the step in the noise key, so that policy and disturbance differ


class EpisodeWriter(Protocol):
    """Receiver of episodes, e.g. a dataset writer."""

    def add(self, episode: Episode) -> None:
        """Write one finished episode."""
        ...


class EpisodeList(list[Episode]):
    """Episode writer that keeps the episodes in memory."""

    def add(self, episode: Episode) -> None:
        """Keep one episode."""
        self.append(episode)


class ActionWriter:
    """Episode writer that passes episodes on and keeps their actions in memory."""

    def __init__(self, writer: EpisodeWriter, actions: list[Tensor]) -> None:
        """Pass episodes to `writer`, and append the actions `(T, A)` of each to `actions`."""
        self.writer, self.actions = writer, actions

    def add(self, episode: Episode) -> None:
        """Keep the actions without the one of a closing frame."""
        self.writer.add(episode)
        closing = episode.arrays.get("closing", np.zeros(len(episode), bool))
        self.actions.append(torch.from_numpy(episode.arrays["action"][~closing]))


@dataclass(frozen=True)
class CollectReport:
    """Statistics of a collection, independent of the number of environments."""

    kept: int  # episodes written
    attempts: int  # episodes run in order of seed until enough were kept
    successes: int | None  # successful attempts; None if the task defines no success
    frames: int  # written
    stopped: str = ""  # reason for fewer episodes than requested: an environment failed

    def __add__(self, other: CollectReport) -> CollectReport:
        """Sum of two collections."""
        successes = None if self.successes is None or other.successes is None else self.successes + other.successes
        attempts = self.attempts + other.attempts
        frames = self.frames + other.frames
        return CollectReport(self.kept + other.kept, attempts, successes, frames, self.stopped or other.stopped)

    def __str__(self) -> str:
        kept = f"kept {counted(self.kept, 'episode')} ({counted(self.frames, 'frame')})"
        if self.successes is None or not self.attempts:
            return kept
        rate = self.successes / self.attempts
        return f"{kept}; success in {self.successes} of {self.attempts} ({rate:.1%})"


def collect(
    sim: VectorSim,
    expert: Expert,
    sink: EpisodeWriter,
    *,
    episodes: int,
    seed: int = 0,
    only_success: bool = True,
    noise: float = 0.0,
    behaviour: str = "",
    after_success: int = 0,
    acting: Expert | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> CollectReport:
    """Run the expert and record episodes in order of their seeds.

    The same seeds give the same dataset for any number of environments: noise is keyed by seed and step of an episode.
    Where the backend cannot seed episodes (`spec.seeded_episodes`), this holds for one number of environments.

    Args:
        sim: Simulator; reset here.
        expert: Demonstrator.
        sink: Receives the kept episodes in order of seed.
        episodes: Number of episodes to keep.
        seed: Seed of the first episode.
        only_success: Drop episodes without a successful step.
        noise: Standard deviation of Gaussian noise on the executed actions, as a fraction of half the action range.
            The dataset contains the intended action of the expert, so that imitation learns to recover (DART, Laskey
            et al. 2017), and as `executed` the applied action, which value learning uses.
        behaviour: Name of the behaviour; if given, record a video dataset for world models: the actions are the
            executed ones, and a closing frame shows the result of the last action.
        after_success: Steps of a video that follow the success that would have ended its episode, if `sim` continues
            (`SimOptions.ends_on_success`). Without them, no frame shows more than the beginning of success.
        acting: Acts in place of the expert, whose intended actions label the visited states (DAgger, Ross et al. 2011).
        progress: Called with (kept, attempts) after every control step.

    Raises:
        UserError: The expert succeeds too rarely, or the task defines no success.
        SimulatorFailed: An environment failed before an episode was kept; a later failure ends the collection.
    """
    if episodes < 1 or noise < 0 or after_success < 0:
        found = f"{episodes}, {noise} and {after_success}"
        raise UserError(f"Collecting needs episodes >= 1, noise >= 0 and after_success >= 0, got {found}.")
    low, high = sim.spec.action_low.to(sim.device), sim.spec.action_high.to(sim.device)
    recorder = EpisodeRecorder(sim.num_envs, sim.spec.task)
    finished: dict[int, Episode] = {}  # by seed, until all earlier seeds have finished
    kept = attempts = successes = frames = 0
    has_success = False
    obs = sim.reset(seed)
    while True:
        seeds = sim.episode_seed.tolist()
        intended = expert(unwrapped(sim), obs).to(torch.float32).clamp(low, high)
        executed = intended if acting is None else acting(unwrapped(sim), obs).to(torch.float32).clamp(low, high)
        if noise:
            steps = (sim.episode_step + _NOISE_KEY_OFFSET).tolist()
            disturbance = PerRowGenerator(seeds, steps).normal(intended.shape).to(sim.device)
            executed = (executed + noise * (high - low) / 2 * disturbance).clamp(low, high)
        try:
            step = sim.step(executed)
        except SimulatorFailed as error:
            if not kept:
                raise
            return CollectReport(kept, attempts, successes if has_success else None, frames, str(error))
        has_success |= "success" in step.info
        if only_success and not has_success and bool(step.done.any()):  # some tasks report success only at the end
            raise UserError(f"Task {sim.spec.task} defines no success; keep all episodes (--keep-failures).")
        applied = {"executed": executed} if (noise or acting is not None) and not behaviour else {}
        recorder.record(obs, {"action": executed if behaviour else intended, **applied}, step)
        obs = step.obs
        for row in step.done.nonzero().flatten().tolist():
            episode = recorder.take(row, seeds[row], has_success=has_success)
            if behaviour:
                last = {key: value[row].cpu().numpy() for key, value in step.final_obs.items()}
                episode = replace(_video(episode, last, after_success), behaviour=behaviour)
            finished[seeds[row]] = episode
        while kept < episodes and (episode := finished.pop(seed + attempts, None)) is not None:
            attempts += 1
            successes += episode.success
            if episode.success or not only_success:
                sink.add(episode)
                kept += 1
                frames += len(episode)
            hopeless = attempts >= _MIN_ATTEMPTS and successes < _MIN_SUCCESS_RATE * attempts
            if only_success and hopeless and kept < episodes:
                raise UserError(
                    f"The expert of {sim.spec.task} succeeded in only {successes} of {attempts} episodes; "
                    "lower the noise or also keep failures."
                )
        if progress:
            progress(kept, attempts)
        if kept == episodes:
            return CollectReport(kept, attempts, successes if has_success else None, frames)


def _video(episode: Episode, last: Mapping[str, NDArray[Any]], after_success: int) -> Episode:
    """Cut `episode` at most `after_success` steps after the first one that ends it, and append a closing frame.

    The closing frame shows the observation after the last action, `last` `{key: (...)}` if nothing is cut.
    """
    ends = episode.arrays["terminated"].nonzero()[0]
    if len(ends):
        length = min(int(ends[0]) + 1 + after_success, len(episode))
        if length < len(episode):
            last = {key: episode.arrays[key][length] for key in last}
        arrays = {key: array[:length] for key, array in episode.arrays.items()}
        episode = replace(episode, arrays=arrays | {"terminated": np.arange(1, length + 1) == length})
    return episode.with_closing_frame(last)


class EpisodeRecorder:
    """Buffer of batched steps, split into episodes when rows finish."""

    def __init__(self, num_envs: int, task: str) -> None:
        """Start an episode of `task` in every row."""
        self._steps: list[Mapping[str, NDArray[Any]]] = []  # {key: (N, ...)} oldest first
        self._first = 0  # step number of `_steps[0]`
        self._starts = np.zeros(num_envs, np.int64)  # (N,) step number at which the running episode began
        self._task = task

    def record(self, obs: Observation, actions: Mapping[str, Tensor], step: Step) -> None:
        """Store one control step of all rows."""
        ends = step.terminated | step.info.get("ended", step.terminated)
        tensors = {**obs, **actions, "reward": step.reward, "terminated": ends}
        if "success" in step.info:
            tensors["success"] = step.info["success"]
        self._steps.append({key: value.cpu().numpy() for key, value in tensors.items()})

    def take(self, row: int, seed: int, *, has_success: bool) -> Episode:
        """Return the episode that `row` has just finished, with successes if `has_success`, and start the next one."""
        begin = int(self._starts[row]) - self._first
        steps = self._steps[begin:]
        arrays = {key: np.stack([step[key][row] for step in steps]) for key in steps[0] if key != "success"}
        if has_success:
            arrays["success"] = np.array([step["success"][row] if "success" in step else False for step in steps])
        self._starts[row] = self._first + len(self._steps)
        unused = int(self._starts.min()) - self._first
        del self._steps[:unused]
        self._first += unused
        return Episode(arrays, self._task, seed)
