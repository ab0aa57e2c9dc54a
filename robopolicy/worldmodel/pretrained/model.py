"""A pretrained video transformer as world model: it continues latent films frame by frame of actions.

The film is a window of C latents that are given (time 1) and k that are drawn together from noise by Euler steps, each
frame told the action that led to it. The state vector is regressed beside, frame after frame, from what changed.

When not to use it: without a GPU (a model of a billion parameters takes minutes a second there), or where the small
model (`robopolicy.worldmodel.latent`) will do.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.constraints import NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.worldmodel.base import LatentVideoModel, disagreement
from robopolicy.worldmodel.contract import Images, WorldSpec
from robopolicy.worldmodel.networks import OutcomeHead
from robopolicy.worldmodel.pretrained.codec import AUTOENCODERS, FrameCodec
from robopolicy.worldmodel.pretrained.families import EXTRA, FAMILIES, ActionConditionedTransformer, build

HUB = "hub:"  # what a source begins with that is to be downloaded
_POOLED = 4  # latent cells along each axis that judge and state vector see


@dataclass(frozen=True)
class AdapterConfig(Validated):
    """What is added to a pretrained model, and how it is sampled."""

    conditioning: str = "modulation"  # how actions enter: modulation | tokens (Wan, SkyReels) | channels
    action_width: PositiveInt = 256  # of the layers that read actions
    lora_rank: NonNegativeInt = (
        0  # of the low-rank updates of all attentions, while the rest is frozen; 0 trains everything
    )
    steps: PositiveInt = 10  # Euler steps per call
    shift: Positive = 3.0  # of the times, in sampling and training, towards noise; 1 spaces them evenly
    samples: PositiveInt = 1  # futures drawn per call; more than one measure how uncertain it is, at their cost
    rows: PositiveInt = 4  # films per network call; a fixed number keeps rounding independent of the batch


@dataclass(frozen=True)
class PretrainedConfig:
    """Everything but the weights."""

    transformer: dict[str, Any]  # configuration in diffusers, with `_class_name`
    autoencoder: dict[str, Any]  # likewise
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

    @property
    def rows(self) -> int:
        """Films per network call."""
        return self.adapter.rows


class PretrainedWorldModel(LatentVideoModel):
    """A `VideoWorldModel` with its own judge, `outcome`. `open_pretrained` makes one of a model of diffusers."""

    name: ClassVar[str] = "pretrained"
    config: PretrainedConfig

    def __init__(
        self, config: PretrainedConfig, spec: WorldSpec, transformer: Any = None, autoencoder: Any = None
    ) -> None:
        """Build from configurations, or around networks that have been loaded."""
        super().__init__(spec)
        if spec.needs_text:
            raise UserError("Pretrained world models read no text here; leave needs_text false.")
        self.config = config
        adapter = config.adapter
        autoencoder = autoencoder or build(config.autoencoder, AUTOENCODERS, "autoencoder")
        self.codec = FrameCodec(autoencoder, spec.cameras, spec.size)
        transformer = transformer or build(config.transformer, FAMILIES, "video transformer")
        self.told = ActionConditionedTransformer(
            transformer, adapter.conditioning, spec.action_dim, adapter.action_width
        )
        if self.told.channels != self.codec.channels:
            sizes = f"{self.told.channels} channels, those of the autoencoder {self.codec.channels}"
            raise UserError(f"Latents of the transformer have {sizes}; take both from one model.")
        patch = transformer.config["patch_size"]
        across = tuple(patch[1:]) if isinstance(patch, list | tuple) else (patch, patch)
        if self.codec.height % across[0] or self.codec.width % across[1]:
            raise UserError(f"{spec.size} pixels do not divide into patches; choose a multiple of the model's.")
        film = (spec.context + spec.frames_per_call, self.codec.height, self.codec.width)
        largest = tuple(transformer.config.get("max_size") or film)
        if any(size > most for size, most in zip(film, largest, strict=True)):
            raise UserError(f"Films of {film} latents are larger than the {largest} that the transformer takes.")
        if adapter.lora_rank:
            _add_lora(transformer, adapter.lora_rank)
        cells, proprio, actions = 2 * self.codec.channels * _POOLED**2, spec.proprio_dim, spec.action_dim
        self.state = nn.Sequential(nn.Linear(cells + proprio + actions, 128), nn.SiLU(), nn.Linear(128, proprio))
        self.outcome = OutcomeHead(self.codec.channels, _POOLED, proprio)

    # Frames and latents

    def encode(self, images: Images) -> Tensor:
        """As the autoencoder does."""
        return self.codec.encode(images)

    def decode(self, latent: Tensor) -> Images:
        """As the autoencoder does."""
        return self.codec.decode(latent)

    # Denoising

    def draw(
        self, streams: PerRowGenerator, given: Tensor, proprio: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The frames of one call, and the state vector step by step through them."""
        played = actions[:, self.spec.context - 1 :]
        shape = (len(given), played.shape[1], *given.shape[2:])
        draws = [
            self.sample(streams.normal(shape).to(self.device), given, actions)
            for _ in range(self.config.adapter.samples)
        ]
        film = torch.cat([given[:, -1:], draws[0]], 1)
        vectors = [proprio[:, -1]]
        for frame, action in enumerate(played.unbind(1)):
            change = self.state_change(film[:, frame], film[:, frame + 1], vectors[-1], action)
            vectors.append(vectors[-1] + change * self.proprio_change_std + self.proprio_change_mean)
        return draws[0], torch.stack(vectors[1:], 1), disagreement(draws)

    def velocity(self, film: Tensor, time: Tensor, actions: Tensor) -> Tensor:
        """Velocity of latents `(B, T, Z, h, w)` at times `(B, T)`; actions `(B, T - 1, A)` in the task's units."""
        told = (actions - self.action_mean) / self.action_std
        told = functional.pad(told, (0, 0, 1, 0))  # nothing led to the first frame
        return self.told.velocity(film, time, told, given=self.spec.context)

    def sample(self, noise: Tensor, given: Tensor, actions: Tensor) -> Tensor:
        """Latents `(B, k, ...)` made of standard normal `noise` by Euler steps, after the frames `given`."""
        adapter, context = self.config.adapter, given.shape[1]
        x, grid = noise, 1 - shifted(torch.linspace(1, 0, adapter.steps + 1), adapter.shift)
        for now, later in itertools.pairwise(grid.tolist()):
            time = noise.new_ones(len(x), context + x.shape[1])
            time[:, context:] = now
            x = x + (later - now) * self.velocity(torch.cat([given, x], 1), time, actions)[:, context:]
        return x

    def state_change(self, before: Tensor, after: Tensor, proprio: Tensor, action: Tensor) -> Tensor:
        """Normalised change of the state vector `(B, P)` between two latents `(B, Z, h, w)`."""
        seen = [_pooled(latent).flatten(1) for latent in (before, after - before)]
        vector = (proprio - self.proprio_mean) / self.proprio_std
        return self.state(torch.cat([*seen, vector, (action - self.action_mean) / self.action_std], 1))

    # The judge

    def judged(self, latent: Tensor, proprio: Tensor) -> Tensor:
        """Logits `(B, 2)` of success and progress at latents `(B, Z, h, w)` and state vectors `(B, P)`."""
        return self.outcome(_pooled(latent), (proprio - self.proprio_mean) / self.proprio_std)


def _pooled(latent: Tensor) -> Tensor:
    return functional.adaptive_avg_pool2d(latent, _POOLED)


def shifted(share: Tensor, shift: float) -> Tensor:
    """Shares of noise, moved towards more of it where `shift` is above 1 (Esser et al. 2024)."""
    return shift * share / (1 + (shift - 1) * share)


def _add_lora(transformer: nn.Module, rank: int) -> None:
    """Freeze a transformer and add low-rank updates to its attentions; they change nothing at first."""
    peft = require("peft", EXTRA)
    transformer.requires_grad_(False)
    attentions = ["to_q", "to_k", "to_v", "to_out.0"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=attentions), transformer)


def open_pretrained(
    source: str | Path, spec: WorldSpec, adapter: AdapterConfig | None = None, *, autoencoder: str | Path = ""
) -> PretrainedWorldModel:
    """A pretrained model with a fresh adapter, which must be trained before it follows actions.

    Args:
        source: A local folder as diffusers saves pipelines, with `transformer` and `vae` in it; or `hub:OWNER/NAME`,
            which downloads. Nothing is downloaded otherwise.
        spec: The world.
        adapter: What is added.
        autoencoder: A folder (or `hub:...`) whose `vae` is taken instead.

    Raises:
        UserError: The folder is missing, a class is not supported, or weights do not fit their configuration.
    """
    transformer = _load(source, "transformer", FAMILIES, "video transformer")
    vae = _load(autoencoder or source, "vae", AUTOENCODERS, "autoencoder")
    config = PretrainedConfig(_plain(transformer), _plain(vae), adapter or AdapterConfig())
    return PretrainedWorldModel(config, spec, transformer, vae).eval()


def _plain(module: Any) -> dict[str, Any]:
    """Configuration of a module of diffusers, with its class and without where it came from."""
    kept = {key: value for key, value in module.config.items() if not key.startswith("_")}
    return {"_class_name": type(module).__name__, **kept}


def _load(source: str | Path, part: str, known: dict[str, Any], kind: str) -> Any:
    """Load one network of a pipeline strictly."""
    name, local = str(source), not str(source).startswith(HUB)
    if local and not (Path(source) / part / "config.json").is_file():
        raise UserError(f"There is no {part}/config.json in {name}; pass a folder of diffusers, or {HUB}OWNER/NAME.")
    if not local and not re.fullmatch(r"hub:[\w.-]+/[\w.-]+", name):
        raise UserError(f"'{name}' is not {HUB}OWNER/NAME.")
    diffusers, place = require("diffusers", EXTRA), name.removeprefix(HUB)
    options = {"subfolder": part, "local_files_only": local}
    try:
        config = getattr(diffusers, next(iter(known))).load_config(place, **options)  # of whatever class
        if config.get("_class_name") not in known:
            raise UserError(f"{name}/{part} is a {config.get('_class_name')}; the {kind} must be one of {list(known)}.")
        cls = getattr(diffusers, config["_class_name"])
        module, report = cls.from_pretrained(
            place, **options, use_safetensors=True, output_loading_info=True, torch_dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{name}/{part} cannot be loaded: {str(error).splitlines()[0]}") from error
    wrong = [f"{len(found)} {kind}, e.g. {next(iter(found))}" for kind, found in report.items() if found]
    if wrong:
        raise UserError(f"Weights of {name}/{part} do not fit its configuration: {'; '.join(wrong)}.")
    return module
