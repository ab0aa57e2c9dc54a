"""The embedded world model: residual latent EDM (S028's evaluation, DIAMOND's sampler), trained from scratch.

Frames are encoded by a small autoencoder. A convolutional denoiser draws the change from the newest latent to the next
one in a few Euler steps, given the last C latents, state vectors and actions; the state vector is regressed beside it.
In training the past is disturbed by noise of random size, so that the model stands its own errors.

When not to use it: many objects, moving cameras or several seconds of memory need a larger, pretrained model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.policies.noise import RowStreams, seats
from robopolicy.worldmodel.contract import (
    Frames,
    Images,
    Judgement,
    WorldSpec,
    WorldState,
    check_actions,
    check_inputs,
)
from robopolicy.worldmodel.networks import DOWN, AutoEncoder, Denoiser, OutcomeHead

_APART = 1 << 40  # added to the step in the key of a film's noise, so that it is not that of the policy in the film


@dataclass(frozen=True)
class LatentConfig:
    """Sizes of the networks and of the sampler."""

    autoencoder_width: int = 32
    latent_channels: int = 8
    width: int = 96  # of the denoiser; a multiple of 8
    blocks: int = 6
    sigmas: tuple[float, ...] = (5.0, 1.0, 0.2)  # noise levels of the Euler steps, falling
    samples: int = 1  # futures drawn per step; more than one measure how uncertain it is, at their cost
    rows: int = 8  # films per network call; a fixed number keeps rounding independent of the batch

    def __post_init__(self) -> None:
        falling = all(first > second for first, second in itertools.pairwise(self.sigmas))
        if not self.sigmas or not falling or self.sigmas[-1] <= 0:
            raise UserError(f"sigmas must be positive and fall, got {list(self.sigmas)}.")
        if self.width % 8 or min(self.width, self.blocks, self.latent_channels, self.samples, self.rows) < 1:
            raise UserError(f"width must be a multiple of 8, and every size at least 1, got {self}.")


PRESETS = {
    "smoke": LatentConfig(autoencoder_width=16, width=32, blocks=2),  # for tests; sees little
    "tiny": LatentConfig(),  # 64 pixels, about 1 M parameters
    "small": LatentConfig(autoencoder_width=64, width=224, blocks=8),  # 64 pixels, about 8 M
    "base": LatentConfig(autoencoder_width=64, latent_channels=16, width=352, blocks=12),  # 128 pixels, about 30 M
}


class LatentWorldModel(nn.Module):
    """A `VideoWorldModel` with its own judge, `outcome`."""

    name: ClassVar[str] = "latent"
    latent_mean: Tensor
    latent_std: Tensor
    change_std: Tensor
    proprio_mean: Tensor
    proprio_std: Tensor
    proprio_change_mean: Tensor
    proprio_change_std: Tensor
    action_mean: Tensor
    action_std: Tensor

    def __init__(self, config: LatentConfig, spec: WorldSpec) -> None:
        """Build the networks; statistics are those of nothing until `fit_vectors` and `fit_latents`."""
        super().__init__()
        if spec.size % DOWN:
            raise UserError(f"Pictures of the latent world model need a multiple of {DOWN} pixels, got {spec.size}.")
        if spec.frames_per_call != 1 or spec.needs_text:
            raise UserError("The latent world model predicts frame by frame and reads no text.")
        self.config, self.spec = config, spec
        self.channels, self.grid = config.latent_channels * len(spec.cameras), spec.size // DOWN
        self.autoencoder = AutoEncoder(config.autoencoder_width, config.latent_channels)
        self.denoiser = Denoiser(
            channels=self.channels,
            grid=self.grid,
            context=spec.context,
            action_dim=spec.action_dim,
            proprio_dim=spec.proprio_dim,
            width=config.width,
            blocks=config.blocks,
        )
        self.outcome = OutcomeHead(self.channels, self.grid, spec.proprio_dim)
        vectors = {"proprio": spec.proprio_dim, "proprio_change": spec.proprio_dim, "action": spec.action_dim}
        self.register_buffer("latent_mean", torch.zeros(()))
        self.register_buffer("latent_std", torch.ones(()))
        self.register_buffer("change_std", torch.ones(self.channels, 1, 1))
        for name, size in vectors.items():
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.latent_mean.device

    # Frames and latents

    def encode(self, images: Images) -> Tensor:
        """Frames `{camera: (B, 3, S, S)}` uint8 to normalised latents `(B, Z, h, w)`."""
        views = [self.autoencoder.encode(to_float(images[camera].to(self.device))) for camera in self.spec.cameras]
        return (torch.cat(views, 1) - self.latent_mean) / self.latent_std

    def decode(self, latent: Tensor) -> Images:
        """Inverse of `encode`."""
        views = (latent * self.latent_std + self.latent_mean).chunk(len(self.spec.cameras), 1)
        pairs = zip(self.spec.cameras, views, strict=True)
        return {camera: to_uint8(self.autoencoder.decode(view)) for camera, view in pairs}

    def fit_vectors(self, **values: Tensor) -> None:
        """Take the statistics of rows `(F, D)` of `proprio`, of its `proprio_change` per frame, and of `action`."""
        for name, rows in values.items():
            spread = rows.std(0)
            getattr(self, f"{name}_mean").copy_(rows.mean(0))
            getattr(self, f"{name}_std").copy_(torch.where(spread > 1e-6, spread, 1.0))

    def fit_latents(self, latents: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Take the statistics of `latents` `(F, Z, h, w)`, as `encode` gave them, and return them normalised.

        `before` and `after` are the indices of frames that follow each other.
        """
        mean, std = latents.mean(), latents.std().clamp(min=1e-6)
        self.latent_mean.add_(mean * self.latent_std)
        self.latent_std.mul_(std)
        latents = (latents - mean) / std
        change = latents[after] - latents[before]
        self.change_std.copy_(change.transpose(0, 1).flatten(1).std(1).clamp(min=1e-3)[:, None, None])
        return latents

    # The contract

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
        # One by one, since rounding depends on the size of a batch.
        parts = [self.encode({camera: view[i : i + 1] for camera, view in frames.items()}) for i in range(count)]
        latents = torch.cat(parts).unflatten(0, (rows, -1)).expand(-1, context, -1, -1, -1)
        if actions is None:
            actions = torch.zeros(rows, context - 1, self.spec.action_dim)
        memory = {
            "latents": latents,
            "proprio": proprio.to(self.device, torch.float32),
            "actions": actions.to(self.device, torch.float32),
        }
        return WorldState(seeds.cpu().clone(), torch.zeros_like(seeds, device="cpu"), memory)

    @torch.no_grad()
    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        """Draw one frame after the other."""
        check_actions(self.spec, state, actions)
        shown: list[Frames] = []
        for action in actions.to(self.device, torch.float32).unbind(1):
            state, frame = self._next(state, action)
            shown.append(frame)
        images = {camera: torch.stack([frame.images[camera] for frame in shown], 1) for camera in self.spec.cameras}
        proprio = torch.stack([frame.proprio for frame in shown], 1)
        return state, Frames(images, proprio, torch.stack([frame.uncertainty for frame in shown], 1))

    def _next(self, state: WorldState, action: Tensor) -> tuple[WorldState, Frames]:
        """One frame of all films, `config.rows` of them at a time, each in the place that its seed gives it."""
        calls = seats(state.seeds.tolist(), self.config.rows)
        parts = [self._draw(state.select(torch.tensor(call.members)), action[call.members]) for call in calls]
        order = torch.tensor([index for call in calls for index in call.seated]).argsort()
        kept = [[value[call.places] for value in part] for call, part in zip(calls, parts, strict=True)]
        order = order.to(self.device)
        latent, proprio, uncertainty, *views = (torch.cat(values)[order] for values in zip(*kept, strict=True))
        memory = {
            "latents": torch.cat([state.memory["latents"][:, 1:], latent[:, None]], 1),
            "proprio": torch.cat([state.memory["proprio"][:, 1:], proprio[:, None]], 1),
            "actions": torch.cat([state.memory["actions"], action[:, None]], 1)[:, 1:],
        }
        images = dict(zip(self.spec.cameras, views, strict=True))
        return WorldState(state.seeds, state.steps + 1, memory), Frames(images, proprio, uncertainty)

    def _draw(self, state: WorldState, action: Tensor) -> tuple[Tensor, ...]:
        """Latents, state vectors, uncertainties and views of the next frames."""
        context, past = state.memory["latents"], state.memory["proprio"]
        actions = torch.cat([state.memory["actions"], action[:, None]], 1)
        count = self.config.samples
        streams = RowStreams(state.seeds.tolist(), (state.steps + _APART).tolist())
        draws: list[tuple[Tensor, Tensor]] = []
        for _ in range(count):
            noise = streams.normal((len(context), self.channels, self.grid, self.grid)).to(self.device)
            draws.append(self.sample(noise, context, past, actions))
        latent = context[:, -1] + draws[0][0] * self.change_std
        proprio = past[:, -1] + draws[0][1] * self.proprio_change_std + self.proprio_change_mean
        changes = torch.stack([change for change, _ in draws])
        spread = changes.var(0, unbiased=True) if count > 1 else torch.zeros_like(changes[0])
        return latent, proprio, spread.flatten(1).mean(1).sqrt(), *self.decode(latent).values()

    # Denoising

    def denoise(
        self, noisy: Tensor, sigma: Tensor, context: Tensor, proprio: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Changes of latents and state vectors, normalised; `proprio` and `actions` are in the task's units."""
        proprio = (proprio - self.proprio_mean) / self.proprio_std
        return self.denoiser(noisy, sigma, context, proprio, (actions - self.action_mean) / self.action_std)

    def sample(self, noise: Tensor, context: Tensor, proprio: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Changes drawn from standard normal `noise` by Euler steps down `config.sigmas`."""
        levels = (*self.config.sigmas, 0.0)
        x, change = noise * levels[0], proprio[:, -1]
        for level, lower in itertools.pairwise(levels):
            clean, change = self.denoise(x, noise.new_full((len(x),), level), context, proprio, actions)
            x = clean + (x - clean) * (lower / level)
        return x, change

    # The judge

    @torch.no_grad()
    def judge(self, images: Images, proprio: Tensor) -> Judgement:
        """Success and progress in the last frame of each clip; it never abstains."""
        latent = self.encode({camera: frames[:, -1] for camera, frames in images.items()})
        success, progress = self.judged(latent, proprio[:, -1].to(self.device)).sigmoid().unbind(1)
        return Judgement(success, progress, torch.zeros_like(success, dtype=torch.bool))

    def judged(self, latent: Tensor, proprio: Tensor) -> Tensor:
        """Logits `(B, 2)` of success and progress at latents `(B, Z, h, w)` and state vectors `(B, P)`."""
        return self.outcome(latent, (proprio - self.proprio_mean) / self.proprio_std)


def to_float(images: Tensor) -> Tensor:
    """uint8 pictures in [-1, 1]."""
    return images.float() / 127.5 - 1.0


def to_uint8(images: Tensor) -> Tensor:
    """Inverse of `to_float`, clipped."""
    return ((images.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
