"""Episodes of a LeRobot dataset; their actions are replayed in the simulator of their task where it is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from robopolicy.data.episodes import Episode
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.errors import UserError
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.physics_state import PhysicsState
from robopolicy.viewer.frames import EpisodeFrame, split_observation

TOLERANCE = 1e-3  # largest difference between recorded and replayed observations that counts as rounding


class DatasetEpisodes:
    """Episodes of the dataset in folder `path`.

    Args:
        path: Folder of the dataset.
        open_sim: Opens the simulator of a task with one environment; a `UserError` means that there is none, and the
            episodes are shown by their images and numbers alone.
    """

    def __init__(self, path: Path, open_sim: Callable[[str], VectorSim]) -> None:
        self._path, self._open_sim = path, open_sim
        self._index = read_lerobot(path, images=False)
        self._sims: dict[str, VectorSim | None] = {}
        self._note = ""
        self.title, self.names = path.name, self._index.names
        self.control_dt = self._index.control_dt
        self.num_episodes = self._index.num_episodes
        self.max_steps = int(self._index.lengths.max())

    def label(self, episode: int) -> str:
        """Number and outcome of an episode."""
        found = self._index.episode(episode)
        outcome = ("success" if found.success else "failure") if "success" in found.arrays else ""
        return ", ".join(part for part in (f"episode {episode}", found.behaviour, outcome) if part)

    def note(self) -> str:
        """Return why the last episode is not shown in 3D, or by how much its replay differs."""
        return self._note

    def frames(self, episode: int) -> Iterator[EpisodeFrame]:
        """Yield the frames of an episode, with the result of its last step."""
        found = read_lerobot(self._path, episodes=[episode]).episode(0)
        states = self._states(found)
        observed = {key: found.arrays[key] for key in self._index.observation_keys if key in found.arrays}
        observed |= {key: value for key, value in found.arrays.items() if key.startswith("image.")}
        rewards = found.arrays.get("reward", np.zeros(len(found)))
        successes = found.arrays.get("success")
        for step in range(len(found) + 1):
            row, before = min(step, len(found) - 1), step - 1
            images, vectors = split_observation({key: value[row] for key, value in observed.items()})
            vectors["action"] = found.arrays["action"][row].astype(np.float32)
            reward = float(rewards[before]) if step else 0.0
            success = None if successes is None else bool(successes[before]) and step > 0
            yield EpisodeFrame(next(states, None), images, vectors, reward, success)

    def close(self) -> None:
        """Close the simulators."""
        for sim in self._sims.values():
            if sim is not None:
                sim.close()
        self._sims.clear()

    def _states(self, episode: Episode) -> Iterator[PhysicsState | None]:
        """Yield the states of the replayed episode; the last one is repeated."""
        self._note = ""
        sim = self._sim(episode)
        if sim is None:
            return
        obs = sim.reset([episode.seed])
        actions = torch.tensor(np.asarray(episode.arrays.get("executed", episode.arrays["action"]), np.float32))
        shared = [key for key in obs.keys() & episode.arrays.keys() if obs[key].is_floating_point()]
        same = [key for key in shared if obs[key].shape[1:] == episode.arrays[key].shape[1:]]
        if len(same) < len(shared):
            self._note = "The task has other observations now, so the replay may differ from the recording."
        state, largest = sim.physics_state(), 0.0
        for step, action in enumerate(actions):
            yield state
            for key in same:
                difference = obs[key][0].cpu().numpy() - episode.arrays[key][step]
                largest = max(largest, float(np.abs(difference).max(initial=0.0)))
            if largest > TOLERANCE:
                self._note = f"The replay differs from the recorded observations by up to {largest:.2g}."
            result = sim.step(action[None].to(sim.device))
            obs, done = result.obs, bool(result.done[0])
            state = state if done else sim.physics_state()
        yield state

    def _sim(self, episode: Episode) -> VectorSim | None:
        """Simulator of the task of an episode; None, with a note, where there is none."""
        if episode.seed < 0:
            self._note = "Without the seed of the episode there is no 3D view."
            return None
        if episode.task not in self._sims:
            try:
                self._sims[episode.task] = self._open_sim(episode.task)
            except UserError:
                self._sims[episode.task] = None
        sim = self._sims[episode.task]
        size = episode.arrays["action"].shape[1]
        if sim is None or sim.spec.action_dim != size:
            self._note = f"There is no simulator of '{episode.task}' with {size} actions, so there is no 3D view."
            return None
        return sim
