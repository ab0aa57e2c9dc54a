"""Base classes of latent video world models and of their training data.

A subclass encodes and decodes frames, samples the next latents and predicts success; the base class implements the
contract (`reset`, `step`, `judge`). On the CPU, videos are encoded separately and predicted in batches of `rows`, each
in the slot that its state determines, because rounding depends on the batch size. On a device, a call has up to
`DEVICE_ROWS` videos.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.device import copy_to
from robopolicy.policies.noise import PerRowGenerator, assign_slots, row_generator
from robopolicy.worldmodel.contract import Frames, Images, Judgement, WorldSpec, WorldState, check_actions, check_inputs
from robopolicy.worldmodel.videos import FrameSampler, VideoDataset

DEVICE_ROWS = 1024  # videos per call on a device
_NOISE_KEY_OFFSET = 1 << 40  # added to the step in the noise key, so that model and policy draw different noise


class LatentVideoModel(nn.Module, ABC):
    """Base class of `VideoWorldModel`s with a state of latents, state vectors and actions, and a success head."""

    name: ClassVar[str]
    config: Any  # frozen dataclass with `rows`, videos per network call
    proprio_mean: Tensor
    proprio_std: Tensor
    proprio_change_mean: Tensor
    proprio_change_std: Tensor
    action_mean: Tensor
    action_std: Tensor
    success_bias: Tensor

    def __init__(self, spec: WorldSpec) -> None:
        """Start with unit statistics, which `fit_vectors` sets, and an unbiased success head."""
        super().__init__()
        self.spec = spec
        vectors = {"proprio": spec.proprio_dim, "proprio_change": spec.proprio_dim, "action": spec.action_dim}
        for name, size in vectors.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))
        self.register_buffer("success_bias", torch.zeros(()))

    @abstractmethod
    def encode(self, images: Images) -> Tensor:
        """Frames `{camera: (B, 3, S, S)}` uint8 to normalised latents `(B, Z, h, w)`."""

    @abstractmethod
    def decode(self, latent: Tensor) -> Images:
        """Inverse of `encode`."""

    @abstractmethod
    def draw(
        self, streams: PerRowGenerator, context: Tensor, proprio: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the next k frames.

        Args:
            streams: One noise stream per video.
            context: Past latents `(B, C, Z, h, w)`.
            proprio: Past state vectors `(B, C, P)`.
            actions: `(B, C - 1 + k, A)`; the last k lead to the new frames.

        Returns:
            Latents `(B, k, Z, h, w)`, state vectors `(B, k, P)` and the disagreement of the samples `(B, k)`.
        """

    @abstractmethod
    def outcome_logits(self, latent: Tensor, proprio: Tensor) -> Tensor:
        """Logits `(B, 2)` of success and progress at latents `(B, Z, h, w)` and state vectors `(B, P)`."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.action_mean.device

    def fit_vectors(self, **values: Tensor) -> None:
        """Set the statistics from rows `(F, D)` of `proprio`, `proprio_change` (per frame) and `action`."""
        for name, rows in values.items():
            spread = rows.std(0)
            getattr(self, f"{name}_mean").copy_(rows.mean(0))
            getattr(self, f"{name}_std").copy_(torch.where(spread > 1e-6, spread, 1.0))

    @torch.no_grad()
    def reset(
        self, images: Images, proprio: Tensor, *, seeds: Tensor, actions: Tensor | None = None, text: str = ""
    ) -> WorldState:
        """Encode the context."""
        check_inputs(self.spec, images, proprio, actions)
        rows, context = proprio.shape[:2]
        static = all(map(_is_static, images.values()))
        frames = {camera: (views[:, :1] if static else views).flatten(0, 1) for camera, views in images.items()}
        count = rows if static else rows * context
        size = 1 if self.device.type == "cpu" else DEVICE_ROWS
        starts = range(0, count, size)
        parts = [self.encode({camera: view[i : i + size] for camera, view in frames.items()}) for i in starts]
        if actions is None:
            actions = torch.zeros(rows, context - 1, self.spec.action_dim)
        memory = {
            "latents": torch.cat(parts).unflatten(0, (rows, -1)).expand(-1, context, -1, -1, -1),
            "proprio": copy_to(proprio.float(), self.device),
            "actions": copy_to(actions.float(), self.device),
        }
        seeds = copy_to(seeds.clone(), self.device)
        return WorldState(seeds, torch.zeros_like(seeds), memory)

    @torch.no_grad()
    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        """Predict `frames_per_call` frames at a time."""
        check_actions(self.spec, state, actions)
        parts: list[Frames] = []
        for chunk in copy_to(actions.float(), self.device).split(self.spec.frames_per_call, 1):
            state, frames = self._next(state, chunk)
            parts.append(frames)
        images = {camera: torch.cat([part.images[camera] for part in parts], 1) for camera in self.spec.cameras}
        proprio = torch.cat([part.proprio for part in parts], 1)
        return state, Frames(images, proprio, torch.cat([part.uncertainty for part in parts], 1))

    def _next(self, state: WorldState, chunk: Tensor) -> tuple[WorldState, Frames]:
        """Predict the frames of one call."""
        if self.device.type == "cpu":
            calls = assign_slots((state.seeds if state.slots is None else state.slots).tolist(), self.config.rows)
            parts = [self._call(state.select(torch.tensor(call.members)), chunk[call.members]) for call in calls]
            order = torch.tensor([index for call in calls for index in call.seated]).argsort()
            kept = [[value[call.places] for value in part] for call, part in zip(calls, parts, strict=True)]
            latents, proprio, uncertainty, *views = (torch.cat(values)[order] for values in zip(*kept, strict=True))
        else:
            batches = torch.arange(len(chunk), device=self.device).split(DEVICE_ROWS)
            parts = [self._call(state.select(rows), chunk[rows]) for rows in batches]
            latents, proprio, uncertainty, *views = (torch.cat(values) for values in zip(*parts, strict=True))
        context = self.spec.context
        memory = {
            "latents": torch.cat([state.memory["latents"], latents], 1)[:, -context:],
            "proprio": torch.cat([state.memory["proprio"], proprio], 1)[:, -context:],
            "actions": torch.cat([state.memory["actions"], chunk], 1)[:, 1 - context :][:, : context - 1],
        }
        images = dict(zip(self.spec.cameras, views, strict=True))
        after = WorldState(state.seeds, state.steps + chunk.shape[1], memory, state.slots)
        return after, Frames(images, proprio, uncertainty)

    def _call(self, state: WorldState, chunk: Tensor) -> tuple[Tensor, ...]:
        """Return latents, state vectors, uncertainties and images of the next frames."""
        streams = row_generator(state.seeds, state.steps + _NOISE_KEY_OFFSET)
        actions = torch.cat([state.memory["actions"], chunk], 1)
        latents, proprio, spread = self.draw(streams, state.memory["latents"], state.memory["proprio"], actions)
        views = self.decode(latents.flatten(0, 1))
        return latents, proprio, spread, *(views[camera].unflatten(0, chunk.shape[:2]) for camera in self.spec.cameras)

    @torch.no_grad()
    def judge(self, images: Images, proprio: Tensor) -> Judgement:
        """Predict success and progress from the last frame of each clip; never abstains."""
        latent = self.encode({camera: frames[:, -1] for camera, frames in images.items()})
        success, progress = self.outcome_logits(latent, proprio[:, -1].to(self.device)).unbind(1)
        success, progress = (success + self.success_bias).sigmoid(), progress.sigmoid()
        return Judgement(success, progress, torch.zeros_like(success, dtype=torch.bool))


def _is_static(frames: Tensor) -> bool:
    """Whether `frames` `(B, C, ...)` are known to be copies of a first frame; comparing them on a device would wait."""
    return frames.stride(1) == 0 or (frames.device.type == "cpu" and bool((frames == frames[:, :1]).all()))


def disagreement(draws: list[Tensor]) -> Tensor:
    """Return the root mean variance `(B, k)` of sampled latents `(B, k, Z, h, w)`; 0 for one sample."""
    drawn = torch.stack(draws)
    spread = drawn.var(0, unbiased=True) if len(draws) > 1 else torch.zeros_like(drawn[0])
    return spread.flatten(2).mean(2).sqrt()


class VideoSource(ABC):
    """Training data of a `LatentVideoModel`; the latents of all frames are computed once, on first use."""

    env_steps = 0

    def __init__(self, videos: VideoDataset, device: torch.device, seed: int = 0) -> None:
        self.videos, self.device = videos, device
        self.sampler = FrameSampler(videos, seed)
        self._latents: Tensor | None = None

    @abstractmethod
    def encode(self, model: Any) -> Tensor:
        """Return the latents `(F, Z, h, w)` of all frames, on the CPU."""

    def latents(self, model: LatentVideoModel) -> Tensor:
        """Return the latents of all frames; the first call also fits the vector statistics of the model."""
        if self._latents is None:
            videos, before = self.videos, self.videos.targets - 1
            self._latents = self.encode(model)
            change = videos.proprio[videos.targets] - videos.proprio[before]
            model.fit_vectors(proprio=videos.proprio, proprio_change=change, action=videos.actions[before])
        return self._latents

    def outcome_batch(self, model: LatentVideoModel, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sample `size` frames: latents, state vectors, and success and progress `(B, 2)`."""
        videos, chosen = self.videos, self.sampler.frames(size)
        outcome = torch.stack([videos.success[chosen], videos.progress[chosen]], 1)
        return self.latents(model)[chosen], videos.proprio[chosen], outcome

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True

    def close(self) -> None:
        """Do nothing; the source holds no resources."""
