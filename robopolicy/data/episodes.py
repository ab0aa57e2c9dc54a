"""Episodes in memory: flat arrays over all frames, and the index at which each episode ends.

A frame holds observation, action and result of a step: the observation keys of the simulator (`state`,
`image.<camera>`, `point_cloud.<camera>`), `action`, and optionally `reward`, `terminated` and `success` of the step
after `action`; with action noise (`collect --noise`), `executed` is the applied action. Where a person may take over
from a policy (`collect --takeover`), `intervention` is true on the frames of the person, and `policy_action` is the
action of the policy on all frames. Where `bootstrap` is false the
task ends at this step but the recording goes on: values do not continue beyond it. A video dataset
(`collect --render`) has one more frame than actions: the last one, where `closing` is true, shows the result of the
last action. Flat arrays map one-to-one onto every file format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from robopolicy.errors import UserError
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.spec import STEP_KEYS

Array = NDArray[Any]


def is_image(key: str) -> bool:
    """Whether `key` holds camera images `(F, 3, height, width)` uint8."""
    return key.startswith(IMAGE_PREFIX)


def is_cloud(key: str) -> bool:
    """Whether `key` holds point clouds `(F, N, 3)` float32 [m]."""
    return key.startswith(CLOUD_PREFIX)


@dataclass(frozen=True)
class Episode:
    """One episode of T frames."""

    arrays: dict[str, Array]  # {key: (T, ...)}
    task: str = ""  # registered task id, or an instruction
    seed: int = -1  # episode seed in the simulator, -1 where unknown
    behaviour: str = ""  # name of the behaviour policy, e.g. "expert+0.3"; empty if unknown
    encoded: Mapping[str, Sequence[bytes]] = field(default_factory=dict[str, Sequence[bytes]])  # PNG or JPEG of images

    def __len__(self) -> int:
        return len(self.arrays["action"])

    @property
    def success(self) -> bool:
        """Whether any step succeeded; False if unknown."""
        return "success" in self.arrays and bool(self.arrays["success"].any())

    def with_closing_frame(self, observation: Mapping[str, Array]) -> Episode:
        """Append a closing frame: the observation `{key: (...)}` after the last action, with a zero action."""
        arrays = {key: np.concatenate([array, np.zeros_like(array[:1])]) for key, array in self.arrays.items()}
        for key, value in observation.items():
            arrays[key][-1] = value
        arrays["closing"] = np.arange(len(self) + 1) == len(self)
        if "terminated" in arrays:
            arrays["terminated"][-2:] = [False, self.arrays["terminated"][-1]]
        return Episode(arrays, self.task, self.seed, self.behaviour)


@dataclass(frozen=True)
class Episodes:
    """E episodes of F frames in total. Checked on construction, never modified afterwards."""

    arrays: dict[str, Array]  # {key: (F, ...)} frames of all episodes, one after the other
    ends: NDArray[np.int64]  # (E,) index one past the last frame of each episode
    tasks: tuple[str, ...]  # (E,)
    seeds: NDArray[np.int64]  # (E,) -1 where unknown
    control_dt: float  # seconds between two frames
    behaviours: tuple[str, ...] = ()  # (E,) names of behaviour policies, empty if unknown; () if all are unknown
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])  # of entries, where known
    action_type: str = ""  # absolute | delta: actions are targets of a controller or changes; empty if unknown
    final_obs: Mapping[str, Array] = field(default_factory=dict[str, Array])  # {key: (E, ...)} after the last actions

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        """Number of frames F."""
        return len(self.arrays["action"])

    @property
    def num_episodes(self) -> int:
        """Number of episodes E."""
        return len(self.ends)

    @property
    def starts(self) -> NDArray[np.int64]:
        """(E,) index of the first frame of each episode."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(E,) frames per episode."""
        return self.ends - self.starts

    @property
    def success(self) -> NDArray[np.bool_]:
        """(E,) whether any step of the episode succeeded; False if unknown."""
        if "success" not in self.arrays:
            return np.zeros(self.num_episodes, np.bool_)
        return np.logical_or.reduceat(self.arrays["success"].astype(np.bool_), self.starts)

    @property
    def observation_keys(self) -> tuple[str, ...]:
        """Keys of `arrays` that are observations."""
        return tuple(key for key in self.arrays if key not in STEP_KEYS)

    def episode(self, index: int) -> Episode:
        """Return views of the frames of one episode."""
        start, end = int(self.starts[index]), int(self.ends[index])
        frames = {key: array[start:end] for key, array in self.arrays.items()}
        behaviour = self.behaviours[index] if self.behaviours else ""
        return Episode(frames, self.tasks[index], int(self.seeds[index]), behaviour)

    def without_closing_frames(self) -> Episodes:
        """Move closing frames, if any, to `final_obs`, for learning from actions.

        `terminated` moves to the last remaining frame.
        """
        if "closing" not in self.arrays:
            return self
        keep = ~self.arrays["closing"].astype(np.bool_)
        arrays = {key: array[keep] for key, array in self.arrays.items() if key != "closing"}
        ends = np.cumsum(np.add.reduceat(keep, self.starts), dtype=np.int64)
        if "terminated" in arrays:
            arrays["terminated"] = np.zeros(len(arrays["action"]), np.bool_)
            arrays["terminated"][ends - 1] = self.arrays["terminated"][self.ends - 1]
        final = {key: self.arrays[key][self.ends - 1] for key in self.observation_keys}
        return replace(self, arrays=arrays, ends=ends, final_obs=final)

    def with_executed_actions(self) -> Episodes:
        """Replace `action` by the executed action, for value and model learning; return `self` without action noise."""
        if "executed" not in self.arrays:
            return self
        return replace(self, arrays=_without(self.arrays, "executed") | {"action": self.arrays["executed"]})

    def demonstrated_frames(self) -> NDArray[np.bool_] | None:
        """Frames `(F,)` on which a person acted; None without `intervention`, where all frames are demonstrations.

        Raises:
            UserError: No one has intervened.
        """
        if "intervention" not in self.arrays:
            return None
        acted = self.arrays["intervention"].astype(np.bool_)
        if not acted.any():
            raise UserError("No frame of the dataset is an intervention; collect with --takeover and take over.")
        return acted

    def demonstrated(self) -> Episodes:
        """Keep only the frames on which a person acted, one episode per intervention, for learning from the person.

        `ChunkSampler(learned=...)` also shows the frames before an intervention to policies that observe several.

        The parts of an episode end as if truncated, except for the last one. Without `intervention`, all frames are
        demonstrations, and `self` is returned.

        Raises:
            UserError: No one has intervened.
        """
        if (acted := self.demonstrated_frames()) is None:
            return self
        last = np.zeros(len(self), np.bool_)
        last[self.ends - 1] = True
        ends_here = acted & (last | ~np.append(acted[1:], False))  # (F,) last frame of an intervention
        episode = np.searchsorted(self.ends, np.flatnonzero(ends_here), side="right")
        unused = ("intervention", "policy_action")
        return replace(
            self,
            arrays={key: array[acted] for key, array in self.arrays.items() if key not in unused},
            ends=np.flatnonzero(ends_here[acted]) + 1,
            tasks=tuple(self.tasks[index] for index in episode),
            seeds=self.seeds[episode],
            behaviours=tuple(self.behaviours[index] for index in episode) if self.behaviours else (),
            final_obs={},
        )

    def subset(self, selection: Sequence[int] | range | Array) -> Episodes:
        """Copy the episodes chosen by indices, e.g. `range(10)`, or by a mask `(E,)`, e.g. `episodes.success`."""
        chosen = np.asarray(selection)
        indices = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        found = Episodes.from_list([self.episode(int(index)) for index in indices], self.control_dt, self.names)
        final = {key: rows[indices] for key, rows in self.final_obs.items()}
        return replace(found, action_type=self.action_type, final_obs=final)

    @classmethod
    def from_list(
        cls, episodes: Iterable[Episode], control_dt: float, names: Mapping[str, tuple[str, ...]] | None = None
    ) -> Episodes:
        """Concatenate episodes with the same keys; `names` are the names of their entries."""
        episodes = list(episodes)
        if not episodes:
            raise UserError("A dataset needs at least one episode, got none; collect or select more episodes.")
        keys = tuple(episodes[0].arrays)
        for index, episode in enumerate(episodes):
            if set(episode.arrays) != set(keys):
                found, expected = (", ".join(sorted(each)) for each in (episode.arrays, keys))
                raise UserError(f"Episode {index} has keys {found}, expected {expected}.")
            for key in keys:
                expected, found = episodes[0].arrays[key].shape[1:], episode.arrays[key].shape[1:]
                if found != expected:
                    raise UserError(f"'{key}' of episode {index} has frames of shape {found}, expected {expected}.")
        return cls(
            arrays={key: np.concatenate([episode.arrays[key] for episode in episodes]) for key in keys},
            ends=np.cumsum([len(episode) for episode in episodes], dtype=np.int64),
            tasks=tuple(episode.task for episode in episodes),
            seeds=np.array([episode.seed for episode in episodes], np.int64),
            control_dt=control_dt,
            behaviours=tuple(episode.behaviour for episode in episodes),
            names=dict(names or {}),
        )

    @classmethod
    def concat(cls, parts: Sequence[Episodes]) -> Episodes:
        """Concatenate datasets with the same keys and control rate; some may have action noise or interventions.

        Frames of datasets without `intervention` are demonstrations, and `policy_action` is dropped unless all have it.
        """
        rates = {part.control_dt for part in parts}
        if len(rates) > 1:
            raise UserError(
                f"Datasets with different control steps {sorted(rates)} s cannot be joined; resample first."
            )
        names: dict[str, tuple[str, ...]] = {}
        for key, entry_names in [pair for part in parts for pair in part.names.items()]:
            if names.setdefault(key, entry_names) != entry_names:
                raise UserError(f"Datasets whose '{key}' holds {names[key]} and {entry_names} cannot be joined.")
        action_types = {part.action_type for part in parts} - {""}
        if len(action_types) > 1:
            raise UserError("Datasets with absolute and with delta actions cannot be joined.")
        if any("executed" in part.arrays for part in parts):
            parts = [replace(part, arrays={"executed": part.arrays["action"], **part.arrays}) for part in parts]
        if any("intervention" in part.arrays for part in parts):
            acted = [{"intervention": np.ones(len(part), np.bool_)} for part in parts]
            parts = [replace(part, arrays=default | part.arrays) for default, part in zip(acted, parts, strict=True)]
        if not all("policy_action" in part.arrays for part in parts):
            parts = [replace(part, arrays=_without(part.arrays, "policy_action")) for part in parts]
        episodes = [part.episode(index) for part in parts for index in range(part.num_episodes)]
        joined = cls.from_list(episodes, parts[0].control_dt if parts else 0.0, names)
        return replace(joined, action_type="".join(action_types))


def _without(arrays: Mapping[str, Array], key: str) -> dict[str, Array]:
    return {name: array for name, array in arrays.items() if name != key}


def _check(data: Episodes) -> None:
    if "action" not in data.arrays:
        raise UserError(f"Episodes need the key 'action'; found {', '.join(sorted(data.arrays))}.")
    frames, ends = len(data), data.ends
    if data.control_dt <= 0:
        raise UserError(f"control_dt must be a positive number of seconds, got {data.control_dt}.")
    if len(ends) == 0 or ends[-1] != frames or np.any(np.diff(ends, prepend=0) <= 0):
        raise UserError(f"Episode ends must rise to the number of frames {frames}, got {ends.tolist()[:8]}.")
    if len(data.tasks) != len(ends) or len(data.seeds) != len(ends):
        raise UserError(f"{len(ends)} episodes need as many tasks and seeds, got {len(data.tasks)}, {len(data.seeds)}.")
    for key, entry_names in data.names.items():
        if key in data.arrays and data.arrays[key].shape[1:] != (len(entry_names),):
            raise UserError(f"'{key}' has frames of shape {data.arrays[key].shape[1:]}, but {len(entry_names)} names.")
    if data.behaviours and len(data.behaviours) != len(ends):
        raise UserError(f"{len(ends)} episodes need as many behaviours, got {len(data.behaviours)}.")
    for key, rows in data.final_obs.items():
        if len(rows) != len(ends):
            raise UserError(f"{len(ends)} episodes need as many final observations, got {len(rows)} of '{key}'.")
    for key, array in data.arrays.items():
        if len(array) != frames:
            raise UserError(f"'{key}' has {len(array)} frames but 'action' has {frames}.")
        if is_image(key) and (array.dtype != np.uint8 or array.ndim != 4 or array.shape[1] != 3):
            raise UserError(f"'{key}' must be uint8 (frames, 3, height, width), got {array.dtype} {array.shape}.")
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            frame = int(np.argwhere(~np.isfinite(array.reshape(frames, -1)).all(1))[0, 0])
            episode = int(np.searchsorted(ends, frame, side="right"))
            place = f"episode {episode} (seed {data.seeds[episode]}), frame {frame - data.starts[episode]}"
            raise UserError(f"'{key}' is not finite in {place}; repair or drop the episode.")
    if "terminated" in data.arrays and np.delete(data.arrays["terminated"], ends - 1).any():
        raise UserError("'terminated' may be true only on the last frame of an episode; split the episodes there.")
    if "closing" in data.arrays and not np.array_equal(np.flatnonzero(data.arrays["closing"]), ends - 1):
        raise UserError("'closing' must be true on the last frame of every episode and nowhere else.")
    if data.arrays["action"].ndim != 2:
        raise UserError(f"'action' must have shape (frames, A), got {data.arrays['action'].shape}.")
    for key in ("executed", "policy_action"):
        if key in data.arrays and data.arrays[key].shape != data.arrays["action"].shape:
            shapes = f"{data.arrays['action'].shape}, got {data.arrays[key].shape}"
            raise UserError(f"'{key}' must have the shape of 'action', {shapes}.")
