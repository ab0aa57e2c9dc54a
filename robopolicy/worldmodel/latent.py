"""Small world model: residual latent EDM with DIAMOND's sampler, trained from scratch.

The evaluation follows Tseng et al. 2025. A small autoencoder encodes frames. A state network regresses the next state
vector from the last C state vectors and actions, and the newest latent. A state decoder regresses the next latent from
that state, and given both, a convolutional denoiser samples the change from the newest latent to the next one in a few
Euler steps. Training adds noise of random size to the context, so that the model is robust to its own errors.

When not to use it: many objects, moving cameras or several seconds of history need a larger, pretrained model.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import Layers, Positive, PositiveInt, Validated
from robopolicy.device import copy_to
from robopolicy.errors import UserError
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.worldmodel.base import LatentVideoModel, disagreement
from robopolicy.worldmodel.contract import Frames, Images, Judgement, WorldSpec, WorldState
from robopolicy.worldmodel.networks import DOWN, AutoEncoder, Denoiser, OutcomeHead, StateDecoder, StateNet


@dataclass(frozen=True)
class LatentWorldModelConfig(Validated):
    """Sizes of the networks and of the sampler."""

    autoencoder_width: PositiveInt = 32
    latent_channels: PositiveInt = 8
    width: PositiveInt = 96  # of the denoiser; a multiple of 8
    blocks: Layers = 6
    state_width: PositiveInt = 256  # of the three hidden layers of the state network
    decoder_width: PositiveInt = 512  # of the three hidden layers of the state decoder
    sigmas: tuple[Positive, ...] = (5.0, 1.0, 0.2)  # noise levels of the Euler steps, falling
    samples: PositiveInt = 1  # samples per step; more than one give an uncertainty, at proportional cost
    rows: PositiveInt = 8  # videos per network call; a fixed number keeps rounding independent of the batch

    def __post_init__(self) -> None:
        super().__post_init__()
        falling = all(first > second for first, second in itertools.pairwise(self.sigmas))
        if not self.sigmas or not falling:
            raise UserError(f"sigmas must be a non-empty falling list, got {list(self.sigmas)}.")
        if self.width % 8:
            raise UserError(f"width must be a multiple of 8, got {self.width}.")


PRESETS = {
    # For tests.
    "smoke": LatentWorldModelConfig(autoencoder_width=16, width=32, blocks=2, state_width=64, decoder_width=128),
    # For 64 pixels: about 2 and 10 M parameters.
    "tiny": LatentWorldModelConfig(),
    "small": LatentWorldModelConfig(autoencoder_width=64, width=224, blocks=8, state_width=512),
    # For 128 pixels: about 33 M.
    "base": LatentWorldModelConfig(autoencoder_width=64, latent_channels=16, width=352, blocks=12, state_width=512),
}


class LatentWorldModel(LatentVideoModel):
    """Latent diffusion world model with a success head, `outcome`."""

    name: ClassVar[str] = "latent"
    latent_mean: Tensor
    latent_std: Tensor
    change_std: Tensor
    config: LatentWorldModelConfig

    def __init__(self, config: LatentWorldModelConfig, spec: WorldSpec) -> None:
        """Build the networks; `fit_vectors` and `fit_latents` set the statistics."""
        super().__init__(spec)
        if spec.size % DOWN:
            raise UserError(f"Pictures of the latent world model need a multiple of {DOWN} pixels, got {spec.size}.")
        if spec.frames_per_call != 1 or spec.needs_text:
            raise UserError("The latent world model predicts one frame per call and takes no text.")
        self.config = config
        self.channels, self.grid = config.latent_channels * len(spec.cameras), spec.size // DOWN
        self.autoencoder = AutoEncoder(config.autoencoder_width, config.latent_channels)
        picture = {"channels": self.channels, "grid": self.grid, "proprio_dim": spec.proprio_dim}
        sizes = picture | {"context": spec.context, "action_dim": spec.action_dim}
        self.denoiser = Denoiser(**sizes, width=config.width, blocks=config.blocks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")  # without a state vector
            self.state = StateNet(**sizes, width=config.state_width)
            self.state_decoder = StateDecoder(**picture, width=config.decoder_width)
        self.outcome = OutcomeHead(self.channels, self.grid, spec.proprio_dim)
        self.register_buffer("latent_mean", torch.zeros(()))
        self.register_buffer("latent_std", torch.ones(()))
        self.register_buffer("change_std", torch.ones(self.channels, 1, 1))

    def encode(self, images: Images) -> Tensor:
        """Encode every camera separately and concatenate the channels."""
        frames = [copy_to(images[camera], self.device) for camera in self.spec.cameras]
        views = [self.autoencoder.encode(to_float(frame)) for frame in frames]
        return (torch.cat(views, 1) - self.latent_mean) / self.latent_std

    def decode(self, latent: Tensor) -> Images:
        """Inverse of `encode`."""
        views = (latent * self.latent_std + self.latent_mean).chunk(len(self.spec.cameras), 1)
        pairs = zip(self.spec.cameras, views, strict=True)
        return {camera: to_uint8(self.autoencoder.decode(view)) for camera, view in pairs}

    def fit_latents(self, latents: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Set the statistics from `latents` `(F, Z, h, w)` of `encode`, and return them normalised.

        `before` and `after` are indices of consecutive frames.
        """
        mean, std = latents.mean(), latents.std().clamp(min=1e-6)
        self.latent_mean.add_(mean * self.latent_std)
        self.latent_std.mul_(std)
        latents = (latents - mean) / std
        change = latents[after] - latents[before]
        self.change_std.copy_(change.transpose(0, 1).flatten(1).std(1).clamp(min=1e-3)[:, None, None])
        return latents

    def draw(
        self, streams: PerRowGenerator, context: Tensor, proprio: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the next frame."""
        shape = (len(context), self.channels, self.grid, self.grid)
        moved = self.state_change(self.state.look(context[:, -1]), proprio, actions)
        draws = [
            self.sample(streams.normal(shape).to(self.device), context, proprio, actions, moved)
            for _ in range(self.config.samples)
        ]
        latent = context[:, -1] + draws[0] * self.change_std
        after = self.moved_state(proprio, moved)
        return latent[:, None], after[:, None], disagreement([change[:, None] for change in draws])

    def state_change(self, features: Tensor, proprio: Tensor, actions: Tensor) -> Tensor:
        """Predict the normalised change of the state vector `(B, P)` from features of the newest latent.

        `proprio` and `actions` are in task units.
        """
        return self.state(features, *self.normalised(proprio, actions))

    def normalised_change(self, proprio: Tensor, after: Tensor) -> Tensor:
        """Normalised change `(B, P)` from the newest of the state vectors `(B, C, P)` to `after` `(B, P)`."""
        return (after - proprio[:, -1] - self.proprio_change_mean) / self.proprio_change_std

    def moved_state(self, proprio: Tensor, moved: Tensor) -> Tensor:
        """Inverse of `normalised_change`: the next state vector `(B, P)`."""
        return proprio[:, -1] + moved * self.proprio_change_std + self.proprio_change_mean

    @torch.no_grad()
    def expected_change(self, context: Tensor, proprio: Tensor, moved: Tensor) -> Tensor:
        """Normalised change from the newest latents to those that the state decoder expects at the next state.

        It is 0 without a state vector.
        """
        if not self.spec.proprio_dim:
            return torch.zeros_like(context[:, -1])
        return (self.decode_state(self.moved_state(proprio, moved)) - context[:, -1]) / self.change_std

    def decode_state(self, proprio: Tensor) -> Tensor:
        """Expected latents `(B, Z, h, w)` of frames with the state vectors `(B, P)`."""
        return self.state_decoder(self.normalised_state(proprio))

    def sample(self, noise: Tensor, context: Tensor, proprio: Tensor, actions: Tensor, moved: Tensor) -> Tensor:
        """Sample changes of latents from standard normal `noise` by Euler steps along `config.sigmas`."""
        given = context, *self.normalised(proprio, actions), moved, self.expected_change(context, proprio, moved)
        levels = (*self.config.sigmas, 0.0)
        x = noise * levels[0]
        for level, lower in itertools.pairwise(levels):
            clean = self.denoiser(x, noise.new_full((len(x),), level), *given)
            x = clean + (x - clean) * (lower / level)
        return x

    def normalised(self, proprio: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Scale state vectors and actions by their statistics."""
        return self.normalised_state(proprio), (actions - self.action_mean) / self.action_std

    def normalised_state(self, proprio: Tensor) -> Tensor:
        """Scale state vectors by their statistics."""
        return (proprio - self.proprio_mean) / self.proprio_std

    def outcome_logits(self, latent: Tensor, proprio: Tensor) -> Tensor:
        """Logits `(B, 2)` of success and progress at latents `(B, Z, h, w)` and state vectors `(B, P)`."""
        return self.outcome(latent, self.normalised_state(proprio))


def to_float(images: Tensor) -> Tensor:
    """Scale uint8 images to [-1, 1]."""
    return images.float() / 127.5 - 1.0


def to_uint8(images: Tensor) -> Tensor:
    """Inverse of `to_float`, clipped."""
    return ((images.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


class EnsembleWorldModel:
    """Ensemble of M world models; a video with seed s is the prediction of member s modulo M."""

    def __init__(self, members: Sequence[LatentVideoModel]) -> None:
        """Combine `members`, which must have one specification."""
        self.members, self.spec = list(members), members[0].spec
        if any(member.spec != self.spec for member in members):
            raise UserError(
                f"World models of one ensemble must have one specification, got {[m.spec for m in members]}."
            )

    @property
    def device(self) -> torch.device:
        """Device of the first member."""
        return self.members[0].device

    def reset(
        self, images: Images, proprio: Tensor, *, seeds: Tensor, actions: Tensor | None = None, text: str = ""
    ) -> WorldState:
        """Reset every member."""
        states = [member.reset(images, proprio, seeds=seeds, actions=actions, text=text) for member in self.members]
        return self._merge(states)

    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        """Step every member; the uncertainty is the root mean variance of their pixels, in [0, 1]."""
        pairs = [member.step(part, actions) for member, part in zip(self.members, self._parts(state), strict=True)]
        predictions = [frames for _, frames in pairs]
        own, rows = state.seeds % len(self.members), torch.arange(len(state.seeds), device=state.seeds.device)

        def select(values: list[Tensor]) -> Tensor:
            return torch.stack(values)[own, rows]

        views = {camera: [frames.images[camera] for frames in predictions] for camera in self.spec.cameras}
        variance = [torch.stack(view).float().div(255).var(0).flatten(2).mean(2) for view in views.values()]
        return self._merge([after for after, _ in pairs]), Frames(
            {camera: select(view) for camera, view in views.items()},
            select([frames.proprio for frames in predictions]),
            torch.stack(variance).mean(0).sqrt(),
        )

    @torch.no_grad()
    def judge(self, images: Images, proprio: Tensor) -> Judgement:
        """Average the members; abstain where they disagree on success."""
        results = [member.judge(images, proprio) for member in self.members]
        success = torch.stack([result.success for result in results])
        votes = (success >= 0.5).float().mean(0)
        progress = torch.stack([result.progress for result in results]).mean(0)
        return Judgement(success.mean(0), progress, (votes > 0) & (votes < 1))

    def _merge(self, states: list[WorldState]) -> WorldState:
        memory = {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.memory.items()}
        return WorldState(states[0].seeds, states[0].steps, memory, states[0].slots)

    def _parts(self, state: WorldState) -> list[WorldState]:
        parts: list[dict[str, Tensor]] = [{} for _ in self.members]
        for name, value in state.memory.items():
            index, _, key = name.partition(".")
            parts[int(index)][key] = value
        return [WorldState(state.seeds, state.steps, memory, state.slots) for memory in parts]
