"""Video datasets for world models: checks, splits by episode and behaviour, and seeded sampling of windows.

An episode has one frame more than actions (`collect --render`); datasets without the last frame also work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.core.distributed import rank, world_size
from robopolicy.data.episodes import Episodes, is_cloud, is_image
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.plurals import counted
from robopolicy.spec import STEP_KEYS
from robopolicy.worldmodel.contract import Images, WorldSpec

_RATE_TOLERANCE = 0.05  # relative; whole-number frame rates round the control step a little


def infer_spec(
    episodes: Episodes, *, cameras: Sequence[str] = (), proprio: Sequence[str] | None = None, context: int = 4
) -> WorldSpec:
    """Derive the specification of a world model from a dataset with its metadata.

    By default all cameras and vector observations are predicted. A UserError is raised for missing names, and for
    images that are not square and of one size.
    """
    found = [key.removeprefix(IMAGE_PREFIX) for key in episodes.arrays if is_image(key)]
    if not found:
        raise UserError("The dataset has no images; collect videos with --render --cameras NAME.")
    vectors = [
        key
        for key, array in episodes.arrays.items()
        if key not in STEP_KEYS and array.ndim == 2 and not is_image(key) and not is_cloud(key)
    ]
    for name in cameras:
        if name not in found:
            raise unknown_name("camera", name, found, "in the dataset")
    for name in proprio or ():
        if name not in vectors:
            raise unknown_name("observation", name, vectors, "in the dataset")
    cameras, proprio = tuple(cameras or found), tuple(vectors if proprio is None else proprio)
    sizes = {episodes.arrays[IMAGE_PREFIX + name].shape[2:] for name in cameras}
    if len(sizes) > 1 or any(height != width for height, width in sizes):
        raise UserError(f"A world model needs square images of one size, found {sorted(sizes)}.")
    return WorldSpec(
        cameras=cameras,
        size=sizes.pop()[0],
        fps=1.0 / episodes.control_dt,
        action_dim=episodes.arrays["action"].shape[1],
        proprio_dim=sum(episodes.arrays[name].shape[1] for name in proprio),
        proprio=proprio,
        context=context,
        action_names=episodes.names.get("action", ()),
        proprio_names=vector_names(episodes.names, proprio),
    )


def vector_names(names: Mapping[str, tuple[str, ...]], keys: Sequence[str]) -> tuple[str, ...]:
    """Return the entry names of a state vector made of `keys`; () where one of them has none."""
    return tuple(name for key in keys for name in names[key]) if all(names.get(key) for key in keys) else ()


def check_videos(spec: WorldSpec, episodes: Episodes, what: str) -> None:
    """Raise a UserError for a dataset `what` whose cameras, rate, actions or state vectors differ from `spec`."""
    if not np.isclose(1.0 / episodes.control_dt, spec.fps, rtol=_RATE_TOLERANCE):
        raise UserError(f"{what} has {1.0 / episodes.control_dt:g} frames per second, expected {spec.fps:g}.")
    for camera in spec.cameras:
        if IMAGE_PREFIX + camera not in episodes.arrays:
            cameras = [key.removeprefix(IMAGE_PREFIX) for key in episodes.arrays if is_image(key)]
            raise UserError(f"{what} has the cameras {cameras}, expected {list(spec.cameras)}.")
        found = episodes.arrays[IMAGE_PREFIX + camera].shape[2:]
        if found != (spec.size, spec.size):
            raise UserError(
                f"Camera '{camera}' of {what} has {found[0]}x{found[1]} pixels, expected {spec.size}x{spec.size}."
            )
    actions = episodes.arrays["action"].shape[1]
    if actions != spec.action_dim:
        raise UserError(f"{what} has {actions} action dimensions, expected {spec.action_dim}.")
    for name in spec.proprio:
        if name not in episodes.arrays:
            raise UserError(f"{what} lacks the observation '{name}', which the world model predicts.")
    found = sum(episodes.arrays[name].shape[1] for name in spec.proprio)
    if found != spec.proprio_dim:
        raise UserError(f"State vectors of {what} have {found} entries, expected {spec.proprio_dim}.")
    check_names(spec, what, episodes.names)


def check_names(spec: WorldSpec, what: str, names: Mapping[str, tuple[str, ...]]) -> None:
    """Raise a UserError for actions or state vectors of `what` with other entry names; unnamed entries are accepted."""
    for kind, expected, found in (
        ("Actions", spec.action_names, names.get("action", ())),
        ("State vectors", spec.proprio_names, vector_names(names, spec.proprio)),
    ):
        if expected and found and expected != found:
            raise UserError(f"{kind} of {what} are {', '.join(found)}; expected {', '.join(expected)}.")


def split_episodes(
    episodes: Episodes, *, share: float = 0.1, held_out: Sequence[str] = (), seed: int = 0
) -> tuple[Episodes, Episodes]:
    """Split into training and validation episodes, stratified by behaviour.

    Validation has a fraction `share` of the episodes of each behaviour, at least one of two, and all episodes of the
    behaviours `held_out`.
    """
    behaviours = episodes.behaviours or ("",) * episodes.num_episodes
    for name in held_out:
        if name not in behaviours:
            raise unknown_name("behaviour", name, set(behaviours), "in the dataset")
    validation = np.isin(np.array(behaviours), held_out)
    rng = np.random.default_rng(seed)
    for name in sorted(set(behaviours) - set(held_out)):
        members = np.flatnonzero(np.array(behaviours) == name)
        count = min(max(1, round(share * len(members))), len(members) - 1)
        validation[rng.permutation(members)[:count]] = True
    if validation.all() or not validation.any():
        found = counted(episodes.num_episodes, "episode")
        raise UserError(f"Some episodes are held back for validation, which needs more than {found}; collect more.")
    return episodes.subset(~validation), episodes.subset(validation)


def alternating_half(success: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask `(E,)` of every second success and every second failure, from the first of each on.

    Success is a mask `(E,)` of episodes. What one half calibrates can be tested on the other half.
    """
    half = np.zeros(len(success), np.bool_)
    for outcome in (success, ~success):
        half[np.flatnonzero(outcome)[::2]] = True
    return half


@dataclass(frozen=True)
class Window:
    """B windows: C frames of context, then h future frames."""

    images: Images  # {camera: (B, C + h, 3, S, S)} uint8
    proprio: Tensor  # (B, C + h, P)
    actions: Tensor  # (B, C + h - 1, A), zero between the copies of a first frame


class VideoDataset:
    """Frames of a dataset as tensors, with an index of its windows."""

    def __init__(self, spec: WorldSpec, episodes: Episodes, what: str = "The dataset") -> None:
        """Check and index `episodes`; `what` is their name in messages."""
        check_videos(spec, episodes, what)
        self.spec, self.episodes = spec, episodes
        self.images = {camera: torch.from_numpy(episodes.arrays[IMAGE_PREFIX + camera]) for camera in spec.cameras}
        vectors = [torch.tensor(episodes.arrays[name], dtype=torch.float32) for name in spec.proprio]
        self.proprio = torch.cat(vectors, 1) if vectors else torch.zeros(len(episodes), 0)  # (F, P)
        self.actions = torch.tensor(episodes.with_executed_actions().arrays["action"], dtype=torch.float32)  # (F, A)
        self.first = torch.from_numpy(np.repeat(episodes.starts, episodes.lengths))  # (F,) first frame of its episode
        self.success = torch.zeros(len(episodes))  # (F,) whether the frame shows success
        self.progress = torch.zeros(len(episodes))  # (F,) discounted time to the first success, where it is 1
        if "success" in episodes.arrays:
            self._set_outcomes(torch.from_numpy(episodes.arrays["success"].astype(np.float32)))
        inside = torch.arange(len(episodes)) > self.first
        self.targets = inside.nonzero().flatten()  # all frames but the first of each episode
        if not len(self.targets):
            raise UserError(f"{what} has no episode of at least two frames; collect longer episodes.")

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def ends_on_success(self) -> bool:
        """Whether episodes terminate at success; False without a success."""
        arrays = self.episodes.arrays
        return "terminated" in arrays and bool(
            arrays["terminated"][self.episodes.ends - 1][self.episodes.success].any()
        )

    @property
    def max_actions(self) -> int:
        """Number of actions of the longest episode."""
        return int(self.episodes.without_closing_frames().lengths.max())

    def window(self, targets: Tensor, horizon: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Return frame indices `(B, C + h)`, actions `(B, C + h - 1, A)` and a mask of real frames `(B, h)`.

        `targets` `(B,)` are the first predicted frames. The context is padded with the first frame of the episode, the
        future with the last one, where the mask is false.
        """
        context = self.spec.context
        frames = targets[:, None] + torch.arange(-context, horizon)
        first, last = self.first[targets][:, None], self._last(targets)[:, None]
        real = frames[:, :-1] >= first
        actions = self.actions[frames[:, :-1].clamp(first, last)] * real[..., None]
        return frames.clamp(first, last), actions, frames[:, context:] <= last

    def clip(self, targets: Tensor, horizon: int) -> Window:
        """Return the windows at `targets`, whose episodes must be long enough."""
        frames, actions, real = self.window(targets, horizon)
        if not bool(real.all()):
            raise ValueError("A clip extends beyond the end of its episode.")
        return Window({camera: value[frames] for camera, value in self.images.items()}, self.proprio[frames], actions)

    def context(self, frames: Tensor) -> Window:
        """Return the C frames up to `frames` `(B,)`, padded with the first frame, and the actions between them."""
        first = self.first[frames][:, None]
        index = frames[:, None] + torch.arange(1 - self.spec.context, 1)
        real, index = index[:, :-1] >= first, torch.maximum(index, first)
        images = {camera: value[index] for camera, value in self.images.items()}
        return Window(images, self.proprio[index], self.actions[index[:, :-1]] * real[..., None])

    def starts(self, horizon: int, count: int, seed: int = 0) -> Tensor:
        """Sample at most `count` targets with `horizon` frames, sorted."""
        room = self._last(self.targets) - self.targets + 1 >= horizon
        candidates = self.targets[room]
        if not len(candidates):
            frames = counted(horizon + 1, "frame")
            raise UserError(f"No episode has {frames}; lower the horizon or collect longer episodes.")
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        return candidates[order[:count]].sort().values

    def _last(self, frames: Tensor) -> Tensor:
        ends = torch.from_numpy(self.episodes.ends)
        return ends[torch.searchsorted(ends, frames, right=True)] - 1

    def _set_outcomes(self, success: Tensor) -> None:
        """Assign the success of a step to the frame after it; progress rises geometrically until the first success."""
        for start, end in zip(self.episodes.starts.tolist(), self.episodes.ends.tolist(), strict=True):
            self.success[start + 1 : end] = success[start : end - 1]
            reached = self.success[start:end].nonzero().flatten()
            if len(reached):
                left = (reached[0] - torch.arange(end - start)).clamp(min=0)
                self.progress[start:end] = 0.95**left


class FrameSampler:
    """Endless seeded sampler of frames."""

    def __init__(self, videos: VideoDataset, seed: int = 0) -> None:
        self.videos = videos
        self._generator = torch.Generator().manual_seed(seed)

    def targets(self, count: int) -> Tensor:
        """Sample `count` frames that have a predecessor; in distributed training, return the share of this process."""
        return self.videos.targets[self._draw(len(self.videos.targets), count)][rank() :: world_size()]

    def frames(self, count: int) -> Tensor:
        """Sample `count` frames as `targets` does, half of them successes if there are any."""
        chosen = self._draw(len(self.videos), count)
        wins = self.videos.success.nonzero().flatten()
        if len(wins):
            chosen[: count // 2] = wins[self._draw(len(wins), count // 2)]
        return chosen[rank() :: world_size()]

    def _draw(self, among: int, count: int) -> Tensor:
        return torch.randint(among, (count,), generator=self._generator)

    def state_dict(self) -> dict[str, Any]:
        """State of the generator."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._generator.set_state(state["generator"])
