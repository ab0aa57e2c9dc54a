"""What world models that continue films of latents share: statistics, seats, the films' memory and the judge.

A subclass encodes and decodes frames, draws the latents that follow, and judges them; `reset`, `step` and `judge` are
then those of the contract. Films are encoded one by one and drawn `rows` at a time, each in the place that its seed
gives it, since rounding depends on the size of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.policies.noise import PerRowGenerator, assign_slots
from robopolicy.worldmodel.contract import (
    Frames,
    Images,
    Judgement,
    WorldSpec,
    WorldState,
    check_actions,
    check_inputs,
)
from robopolicy.worldmodel.videos import FrameSampler, VideoDataset

_APART = 1 << 40  # added to the step in the key of a film's noise, so that it is not that of the policy in the film


class LatentVideoModel(nn.Module, ABC):
    """A `VideoWorldModel` whose memory are latents, state vectors and actions; with its own judge."""

    name: ClassVar[str]
    config: Any  # frozen dataclass with `rows`, films per network call
    proprio_mean: Tensor
    proprio_std: Tensor
    proprio_change_mean: Tensor
    proprio_change_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, spec: WorldSpec) -> None:
        """Statistics are those of nothing until `fit_vectors`."""
        super().__init__()
        self.spec = spec
        vectors = {"proprio": spec.proprio_dim, "proprio_change": spec.proprio_dim, "action": spec.action_dim}
        for name, size in vectors.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @abstractmethod
    def encode(self, images: Images) -> Tensor:
        """Frames `{camera: (B, 3, S, S)}` uint8 to normalised latents `(B, Z, h, w)`."""

    @abstractmethod
    def decode(self, latent: Tensor) -> Images:
        """Inverse of `encode`."""

    @abstractmethod
    def draw(
        self, streams: PerRowGenerator, given: Tensor, proprio: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What follows the C latents `given` `(B, C, Z, h, w)` in k frames, with noise of `streams`.

        Args:
            streams: One stream per film.
            given: Latents so far.
            proprio: State vectors beside them `(B, C, P)`.
            actions: `(B, C - 1 + k, A)`, the last k of which lead to the new frames.

        Returns:
            Latents `(B, k, Z, h, w)`, state vectors `(B, k, P)` and the disagreement of samples `(B, k)`.
        """

    @abstractmethod
    def judged(self, latent: Tensor, proprio: Tensor) -> Tensor:
        """Logits `(B, 2)` of success and progress at latents `(B, Z, h, w)` and state vectors `(B, P)`."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.action_mean.device

    def fit_vectors(self, **values: Tensor) -> None:
        """Take the statistics of rows `(F, D)` of `proprio`, of its `proprio_change` per frame, and of `action`."""
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
        still = all(bool((frames == frames[:, :1]).all()) for frames in images.values())  # copies of a first frame
        frames = {camera: (views[:, :1] if still else views).flatten(0, 1) for camera, views in images.items()}
        count = rows if still else rows * context
        parts = [self.encode({camera: view[i : i + 1] for camera, view in frames.items()}) for i in range(count)]
        if actions is None:
            actions = torch.zeros(rows, context - 1, self.spec.action_dim)
        memory = {
            "latents": torch.cat(parts).unflatten(0, (rows, -1)).expand(-1, context, -1, -1, -1),
            "proprio": proprio.to(self.device, torch.float32),
            "actions": actions.to(self.device, torch.float32),
        }
        return WorldState(seeds.cpu().clone(), torch.zeros_like(seeds, device="cpu"), memory)

    @torch.no_grad()
    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        """Draw `frames_per_call` frames after the other."""
        check_actions(self.spec, state, actions)
        shown: list[Frames] = []
        for chunk in actions.to(self.device, torch.float32).split(self.spec.frames_per_call, 1):
            state, frames = self._next(state, chunk)
            shown.append(frames)
        images = {camera: torch.cat([frames.images[camera] for frames in shown], 1) for camera in self.spec.cameras}
        proprio = torch.cat([frames.proprio for frames in shown], 1)
        return state, Frames(images, proprio, torch.cat([frames.uncertainty for frames in shown], 1))

    def _next(self, state: WorldState, chunk: Tensor) -> tuple[WorldState, Frames]:
        """The frames of one call."""
        calls = assign_slots(state.seeds.tolist(), self.config.rows)
        parts = [self._call(state.select(torch.tensor(call.members)), chunk[call.members]) for call in calls]
        order = torch.tensor([index for call in calls for index in call.seated]).argsort().to(self.device)
        kept = [[value[call.places] for value in part] for call, part in zip(calls, parts, strict=True)]
        latents, proprio, uncertainty, *views = (torch.cat(values)[order] for values in zip(*kept, strict=True))
        context = self.spec.context
        memory = {
            "latents": torch.cat([state.memory["latents"], latents], 1)[:, -context:],
            "proprio": torch.cat([state.memory["proprio"], proprio], 1)[:, -context:],
            "actions": torch.cat([state.memory["actions"], chunk], 1)[:, 1 - context :][:, : context - 1],
        }
        images = dict(zip(self.spec.cameras, views, strict=True))
        return WorldState(state.seeds, state.steps + chunk.shape[1], memory), Frames(images, proprio, uncertainty)

    def _call(self, state: WorldState, chunk: Tensor) -> tuple[Tensor, ...]:
        """Latents, state vectors, uncertainties and views of the next frames."""
        streams = PerRowGenerator(state.seeds.tolist(), (state.steps + _APART).tolist())
        actions = torch.cat([state.memory["actions"], chunk], 1)
        latents, proprio, spread = self.draw(streams, state.memory["latents"], state.memory["proprio"], actions)
        views = self.decode(latents.flatten(0, 1))
        return latents, proprio, spread, *(views[camera].unflatten(0, chunk.shape[:2]) for camera in self.spec.cameras)

    @torch.no_grad()
    def judge(self, images: Images, proprio: Tensor) -> Judgement:
        """Success and progress in the last frame of each clip; it never abstains."""
        latent = self.encode({camera: frames[:, -1] for camera, frames in images.items()})
        success, progress = self.judged(latent, proprio[:, -1].to(self.device)).sigmoid().unbind(1)
        return Judgement(success, progress, torch.zeros_like(success, dtype=torch.bool))


def disagreement(draws: list[Tensor]) -> Tensor:
    """Root of the mean variance `(B, k)` between drawn latents `(B, k, Z, h, w)`; 0 for one draw."""
    drawn = torch.stack(draws)
    spread = drawn.var(0, unbiased=True) if len(draws) > 1 else torch.zeros_like(drawn[0])
    return spread.flatten(2).mean(2).sqrt()


class VideoSource(ABC):
    """Batches for a learner of a `LatentVideoModel`; the latents of all frames are computed once, when first needed."""

    env_steps = 0

    def __init__(self, films: VideoDataset, device: torch.device, seed: int = 0) -> None:
        self.films, self.device = films, device
        self.sampler = FrameSampler(films, seed)
        self._latents: Tensor | None = None

    @abstractmethod
    def encode(self, model: Any) -> Tensor:
        """Latents `(F, Z, h, w)` of all frames, on the CPU."""

    def latents(self, model: LatentVideoModel) -> Tensor:
        """Those of all frames; with them the model takes the statistics of the films' vectors."""
        if self._latents is None:
            films, played = self.films, self.films.targets - 1
            self._latents = self.encode(model)
            change = films.proprio[films.targets] - films.proprio[played]
            model.fit_vectors(proprio=films.proprio, proprio_change=change, action=films.actions[played])
        return self._latents

    def judged(self, model: LatentVideoModel, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Latents, state vectors and outcomes `(B, 2)`, success and progress, of `size` frames drawn evenly."""
        films, chosen = self.films, self.sampler.frames(size)
        outcome = torch.stack([films.success[chosen], films.progress[chosen]], 1)
        return self.latents(model)[chosen], films.proprio[chosen], outcome

    def metrics(self) -> dict[str, float]:
        """Nothing of its own."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True

    def close(self) -> None:  # noqa: B027 - there is nothing to free
        """Nothing to free."""
