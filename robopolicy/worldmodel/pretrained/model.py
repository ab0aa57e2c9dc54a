"""World model from a pretrained video transformer, fine-tuned to follow actions.

A window has C latents of context (time 1) and k that are sampled together from noise by Euler steps; every frame is
conditioned on the action that led to it. The state vector is regressed frame by frame from the change of the latents.

When not to use it: without a GPU (a model of a billion parameters takes minutes per second of video on a CPU), or where
the small model (`robopolicy.worldmodel.latent`) is sufficient.
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
from robopolicy.worldmodel.pretrained.families import EXTRA, FAMILIES, ActionConditionedTransformer, build_module

HUB = "hub:"  # prefix of sources on the Hugging Face hub
_POOLED = 4  # latent cells along each axis for success head and state vector


@dataclass(frozen=True)
class AdapterConfig(Validated):
    """Adapter and sampler settings of a pretrained model."""

    conditioning: str = "modulation"  # how actions enter: modulation | tokens (Wan, SkyReels) | channels
    action_width: PositiveInt = 256  # width of the layers that encode actions
    lora_rank: NonNegativeInt = 0  # rank of the updates of all attentions, with the rest frozen; 0 trains all weights
    steps: PositiveInt = 10  # Euler steps per call
    shift: Positive = 3.0  # shift of the times towards noise, in sampling and training; 1 is uniform
    samples: PositiveInt = 1  # samples per call; more than one give an uncertainty, at proportional cost
    rows: PositiveInt = 4  # videos per network call; a fixed number keeps rounding independent of the batch


@dataclass(frozen=True)
class PretrainedConfig:
    """Configuration without the weights."""

    transformer: dict[str, Any]  # configuration in diffusers, with `_class_name`
    autoencoder: dict[str, Any]  # configuration in diffusers, with `_class_name`
    adapter: AdapterConfig = field(default_factory=AdapterConfig)

    @property
    def rows(self) -> int:
        """Videos per network call."""
        return self.adapter.rows


class PretrainedWorldModel(LatentVideoModel):
    """World model from a model of diffusers, with a success head, `outcome`; created by `open_pretrained`."""

    name: ClassVar[str] = "pretrained"
    config: PretrainedConfig

    def __init__(
        self, config: PretrainedConfig, spec: WorldSpec, transformer: Any = None, autoencoder: Any = None
    ) -> None:
        """Build the networks from configurations, or use the given ones."""
        super().__init__(spec)
        if spec.needs_text:
            raise UserError("Pretrained world models take no text here; set needs_text to false.")
        self.config = config
        adapter = config.adapter
        autoencoder = autoencoder or build_module(config.autoencoder, AUTOENCODERS, "autoencoder")
        self.codec = FrameCodec(autoencoder, spec.cameras, spec.size)
        transformer = transformer or build_module(config.transformer, FAMILIES, "video transformer")
        self.told = ActionConditionedTransformer(
            transformer, adapter.conditioning, spec.action_dim, adapter.action_width
        )
        if self.told.channels != self.codec.channels:
            sizes = f"{self.told.channels} channels, latents of the autoencoder {self.codec.channels}"
            raise UserError(f"Latents of the transformer have {sizes}; take both from one model.")
        patch = transformer.config["patch_size"]
        across = tuple(patch[1:]) if isinstance(patch, list | tuple) else (patch, patch)
        if self.codec.height % across[0] or self.codec.width % across[1]:
            raise UserError(f"{spec.size} pixels do not divide into patches; choose a multiple of the model's.")
        window = (spec.context + spec.frames_per_call, self.codec.height, self.codec.width)
        largest = tuple(transformer.config.get("max_size") or window)
        if any(size > most for size, most in zip(window, largest, strict=True)):
            raise UserError(f"Videos of {window} latents exceed the maximum {largest} of the transformer.")
        if adapter.lora_rank:
            _add_lora(transformer, adapter.lora_rank)
        cells, proprio, actions = 2 * self.codec.channels * _POOLED**2, spec.proprio_dim, spec.action_dim
        self.state = nn.Sequential(nn.Linear(cells + proprio + actions, 128), nn.SiLU(), nn.Linear(128, proprio))
        self.outcome = OutcomeHead(self.codec.channels, _POOLED, proprio)

    def encode(self, images: Images) -> Tensor:
        """Encode frames with the pretrained autoencoder."""
        return self.codec.encode(images)

    def decode(self, latent: Tensor) -> Images:
        """Inverse of `encode`."""
        return self.codec.decode(latent)

    def draw(
        self, streams: PerRowGenerator, context: Tensor, proprio: Tensor, actions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sample the frames of one call; the state vector follows frame by frame."""
        future = actions[:, self.spec.context - 1 :]
        shape = (len(context), future.shape[1], *context.shape[2:])
        draws = [
            self.sample(streams.normal(shape).to(self.device), context, actions)
            for _ in range(self.config.adapter.samples)
        ]
        latents = torch.cat([context[:, -1:], draws[0]], 1)
        vectors = [proprio[:, -1]]
        for frame, action in enumerate(future.unbind(1)):
            change = self.state_change(latents[:, frame], latents[:, frame + 1], vectors[-1], action)
            vectors.append(vectors[-1] + change * self.proprio_change_std + self.proprio_change_mean)
        return draws[0], torch.stack(vectors[1:], 1), disagreement(draws)

    def velocity(self, latents: Tensor, time: Tensor, actions: Tensor) -> Tensor:
        """Return the velocity of latents `(B, T, ...)` at `time` `(B, T)`; `actions` `(B, T - 1, A)` in task units."""
        normalized = (actions - self.action_mean) / self.action_std
        normalized = functional.pad(normalized, (0, 0, 1, 0))  # the first frame has no action
        return self.told.velocity(latents, time, normalized, given=self.spec.context)

    def sample(self, noise: Tensor, context: Tensor, actions: Tensor) -> Tensor:
        """Sample latents `(B, k, ...)` after `context` from standard normal `noise` by Euler steps."""
        adapter, past = self.config.adapter, context.shape[1]
        x, grid = noise, 1 - shifted(torch.linspace(1, 0, adapter.steps + 1), adapter.shift)
        for now, later in itertools.pairwise(grid.tolist()):
            time = noise.new_ones(len(x), past + x.shape[1])
            time[:, past:] = now
            x = x + (later - now) * self.velocity(torch.cat([context, x], 1), time, actions)[:, past:]
        return x

    def state_change(self, before: Tensor, after: Tensor, proprio: Tensor, action: Tensor) -> Tensor:
        """Predict the normalised change of the state vector `(B, P)` between two latents `(B, Z, h, w)`."""
        features = [_pooled(latent).flatten(1) for latent in (before, after - before)]
        vector = (proprio - self.proprio_mean) / self.proprio_std
        return self.state(torch.cat([*features, vector, (action - self.action_mean) / self.action_std], 1))

    def outcome_logits(self, latent: Tensor, proprio: Tensor) -> Tensor:
        """Logits `(B, 2)` of success and progress at latents `(B, Z, h, w)` and state vectors `(B, P)`."""
        return self.outcome(_pooled(latent), (proprio - self.proprio_mean) / self.proprio_std)


def _pooled(latent: Tensor) -> Tensor:
    return functional.adaptive_avg_pool2d(latent, _POOLED)


def shifted(share: Tensor, shift: float) -> Tensor:
    """Shift noise levels towards more noise where `shift` is above 1 (Esser et al. 2024)."""
    return shift * share / (1 + (shift - 1) * share)


def _add_lora(transformer: nn.Module, rank: int) -> None:
    """Freeze a transformer and add low-rank updates, initially zero, to its attentions."""
    peft = require("peft", EXTRA)
    transformer.requires_grad_(False)
    attentions = ["to_q", "to_k", "to_v", "to_out.0"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=attentions), transformer)


def open_pretrained(
    source: str | Path, spec: WorldSpec, adapter: AdapterConfig | None = None, *, autoencoder: str | Path = ""
) -> PretrainedWorldModel:
    """Load a pretrained model with a new adapter, which must be trained before it follows actions.

    `source` is a folder of a diffusers pipeline with `transformer` and `vae`, or `hub:OWNER/NAME`, which is downloaded;
    `autoencoder` is another source of the `vae`. A UserError is raised for missing files, unsupported classes, and
    weights that do not match their configuration.
    """
    transformer = _load(source, "transformer", FAMILIES, "video transformer")
    vae = _load(autoencoder or source, "vae", AUTOENCODERS, "autoencoder")
    config = PretrainedConfig(_plain(transformer), _plain(vae), adapter or AdapterConfig())
    return PretrainedWorldModel(config, spec, transformer, vae).eval()


def _plain(module: Any) -> dict[str, Any]:
    """Return the configuration of a diffusers module with its class and without its origin."""
    kept = {key: value for key, value in module.config.items() if not key.startswith("_")}
    return {"_class_name": type(module).__name__, **kept}


def _load(source: str | Path, part: str, known: dict[str, Any], kind: str) -> Any:
    """Load one network of a pipeline; all weights must match."""
    name, local = str(source), not str(source).startswith(HUB)
    if local and not (Path(source) / part / "config.json").is_file():
        raise UserError(f"There is no {part}/config.json in {name}; pass a folder of diffusers, or {HUB}OWNER/NAME.")
    if not local and not re.fullmatch(r"hub:[\w.-]+/[\w.-]+", name):
        raise UserError(f"'{name}' is not {HUB}OWNER/NAME.")
    diffusers, place = require("diffusers", EXTRA), name.removeprefix(HUB)
    options = {"subfolder": part, "local_files_only": local}
    try:
        config = getattr(diffusers, next(iter(known))).load_config(place, **options)  # works for any class
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
