"""Supported video transformers of diffusers: their call signatures, and the modules that receive actions.

No model code is copied: forward hooks, registered only during a call, add the action features of a frame to the output
of a module, or pass them to the cross-attention. The parameter names of the checkpoint are unchanged.

diffusers counts time from data to noise and predicts noise - data; `ActionConditionedTransformer.velocity` uses our
convention (time 0 is noise, 1 is data, velocity = data - noise), with a time per frame. A transformer must have been
trained with rectified flow, as all supported ones were (Cosmos from Predict2 on, whose scaling is equivalent).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.errors import UserError, unknown_name
from robopolicy.optional import require

EXTRA = "diffusers"
CONDITIONINGS = ("modulation", "tokens", "channels")


@dataclass(frozen=True)
class Family:
    """Properties of a transformer class of diffusers."""

    time: str  # module of the timestep embedding
    output: int  # index of its output that modulates the blocks
    modulations: int  # vectors of the network's width in that output
    patch: str  # module of the patch embedding
    frame_axis: int | None  # frame axis of its output; None where frames, rows and columns share axis 1
    text: str  # entry of the config with the width of a text token
    blocks: str | None  # blocks whose `attn2` can receive an action per frame; None where not supported
    pure_noise: float  # timestep of pure noise
    call: Callable[[nn.Module, Tensor, Tensor, Tensor, int], Tensor]  # network, latents, timesteps, text, given


def _tokens(x: Tensor, times: Tensor, patch: tuple[int, int]) -> Tensor:
    """Repeat timesteps of frames `(B, T)` for their tokens `(B, T h w)`."""
    return times.repeat_interleave((x.shape[3] // patch[0]) * (x.shape[4] // patch[1]), 1)


def _wan(network: Any, x: Tensor, times: Tensor, text: Tensor, given: int) -> Tensor:
    times = _tokens(x, times, network.config.patch_size[1:])
    return network(x, timestep=times, encoder_hidden_states=text, return_dict=False)[0]


def _skyreels(network: Any, x: Tensor, times: Tensor, text: Tensor, given: int) -> Tensor:
    inputs = {"timestep": times, "encoder_hidden_states": text}
    return network(x, **inputs, enable_diffusion_forcing=True, return_dict=False)[0]


def _ltx(network: Any, x: Tensor, times: Tensor, text: Tensor, given: int) -> Tensor:
    frames, height, width = x.shape[2:]
    out = network(
        x.flatten(2).transpose(1, 2),  # (B, T h w, Z)
        encoder_hidden_states=text,
        timestep=_tokens(x, times, (1, 1)),
        encoder_attention_mask=torch.ones(text.shape[:2], device=x.device),
        num_frames=frames,
        height=height,
        width=width,
        return_dict=False,
    )[0]
    return out.transpose(1, 2).unflatten(2, (frames, height, width))


def _cosmos(network: Any, x: Tensor, times: Tensor, text: Tensor, given: int) -> Tensor:
    if network.config.in_channels > network.config.out_channels:  # video to world: mask of the context
        mask = torch.zeros_like(x[:, :1])
        mask[:, :, :given] = 1
        x = torch.cat([x, mask], 1)
    channels = network.patch_embed.proj.in_features // math.prod(network.config.patch_size)
    x = functional.pad(x, (0, 0, 0, 0, 0, 0, 0, channels - x.shape[1]))  # zeros in the padding mask
    inputs = {"timestep": times[:, None, :, None, None], "encoder_hidden_states": text}
    return network(x, **inputs, return_dict=False)[0]


FAMILIES = {
    "WanTransformer3DModel": Family("condition_embedder", 1, 6, "patch_embedding", 2, "text_dim", "blocks", 1e3, _wan),
    "SkyReelsV2Transformer3DModel": Family(
        "condition_embedder", 1, 6, "patch_embedding", 2, "text_dim", "blocks", 1e3, _skyreels
    ),
    "LTXVideoTransformer3DModel": Family("time_embed", 0, 6, "proj_in", None, "caption_channels", None, 1e3, _ltx),
    "CosmosTransformer3DModel": Family("time_embed", 0, 3, "patch_embed", 1, "text_embed_dim", None, 1.0, _cosmos),
}


def build_module(config: dict[str, Any], known: dict[str, Any], kind: str) -> Any:
    """Create a module of diffusers, of a class in `known`, with random weights from its configuration."""
    name = config.get("_class_name", "")
    if name not in known:
        raise unknown_name(kind, str(name), known)
    cls = getattr(require("diffusers", EXTRA), name)
    try:
        return cls.from_config(config)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"diffusers rejects the configuration of the {kind} {name}: {error}") from error


class ActionConditionedTransformer(nn.Module):
    """Video transformer of diffusers conditioned on one action per frame.

    The last layer of the action encoder is zero at first, so that the pretrained predictions are unchanged:

    * `modulation`: the action is added to the timestep embedding of its frame, as in IRASim and WorldGym.
    * `tokens`: each frame attends to the text and to a token of its action, as in Ctrl-World.
    * `channels`: the action is added to the tokens of its frame. This is a widened, zero-initialised patch embedding
      of channels that repeat action features in every pixel of the frame.

    The text is empty (one token of zeros).
    """

    def __init__(self, network: Any, conditioning: str, action_dim: int, width: int) -> None:
        super().__init__()
        name = type(network).__name__
        if name not in FAMILIES:
            raise unknown_name("video transformer", name, FAMILIES)
        if conditioning not in CONDITIONINGS:
            raise unknown_name("conditioning", conditioning, CONDITIONINGS)
        self.family, self.conditioning, self.network = FAMILIES[name], conditioning, network
        if conditioning == "tokens" and self.family.blocks is None:
            raise UserError(f"{name} takes actions by modulation or channels, not by tokens.")
        self.channels = _check(name, network.config)
        if network.config.get("concat_padding_mask"):  # diffusers would resize it with torchvision; `_cosmos` adds it
            network.register_to_config(concat_padding_mask=False)
        projected = network.config.get("use_crossattn_projection")  # Cosmos-Predict2.5 has wider text tokens
        self.words = int(network.config["crossattn_proj_in_channels" if projected else self.family.text])
        inner = int(network.config["num_attention_heads"]) * int(network.config["attention_head_dim"])
        out = {"modulation": inner * self.family.modulations, "tokens": self.words, "channels": inner}[conditioning]
        self.told = nn.Sequential(
            nn.Linear(action_dim, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, out)
        )
        last = self.told[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def velocity(self, x: Tensor, time: Tensor, actions: Tensor | None, given: int = 0) -> Tensor:
        """Predict the velocity, data - noise, of latents.

        `x` are noisy latents `(B, T, Z, h, w)`; `time` `(B, T)` is 0 for noise and 1 for data; `actions` `(B, T, A)`
        are the normalised actions that led to each frame, None for the pretrained network; the first `given` frames are
        context, for networks with a mask channel.
        """
        text = x.new_zeros(len(x), 1, self.words)
        with self._hooked(actions):
            timesteps = self.family.pure_noise * (1 - time)
            return -self.family.call(self.network, x.transpose(1, 2), timesteps, text, given).transpose(1, 2)

    @contextmanager
    def _hooked(self, actions: Tensor | None) -> Iterator[None]:
        handles = [] if actions is None else self._hooks(self.told(actions))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, features: Tensor) -> list[Any]:
        """Register the hooks that add `features` `(B, T, D)` of the actions."""
        family, network = self.family, self.network
        if self.conditioning == "modulation":

            def modulate(module: nn.Module, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
                """Add the features; a timestep embedding has one output per frame or per token."""
                parts = list(output)
                found = parts[family.output]
                repeated = features.repeat_interleave(found.numel() // features.numel(), 1)
                parts[family.output] = found + repeated.reshape(found.shape).to(found.dtype)
                return tuple(parts)

            return [network.get_submodule(family.time).register_forward_hook(modulate)]
        if self.conditioning == "channels":

            def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                return output + _per_token(features, output, family.frame_axis).to(output.dtype)

            return [network.get_submodule(family.patch).register_forward_hook(add)]
        return self._attend(features)

    def _attend(self, features: Tensor) -> list[Any]:
        """Register hooks that let every frame attend to the text and to its action."""
        frames, text_embedder = features.shape[1], self.network.get_submodule(f"{self.family.time}.text_embedder")
        tokens = text_embedder(features).flatten(0, 1)[:, None]  # (B T, 1, inner)

        def split_frames(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
            hidden, text, *rest = inputs
            hidden = hidden.unflatten(1, (frames, -1)).flatten(0, 1)  # (B T, h w, inner)
            text = torch.cat([text.repeat_interleave(frames, 0), tokens.to(text.dtype)], 1)
            return hidden, text, *rest

        def merge_frames(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output.unflatten(0, (-1, frames)).flatten(1, 2)

        attentions = [block.attn2 for block in self.network.get_submodule(str(self.family.blocks))]
        before = [attention.register_forward_pre_hook(split_frames) for attention in attentions]
        return before + [attention.register_forward_hook(merge_frames) for attention in attentions]


def _check(name: str, config: Any) -> int:
    """Return the latent channels of a transformer; a UserError is raised for unsupported variants."""
    patch = config["patch_size"]
    if (patch[0] if isinstance(patch, list | tuple) else config["patch_size_t"]) != 1:
        raise UserError(f"{name} merges frames (temporal patches), which does not allow one action per frame.")
    if config["in_channels"] - config["out_channels"] not in ((0, 1) if "max_size" in config else (0,)):
        sizes = f"{config['in_channels']} input channels, but predicts {config['out_channels']}"
        raise UserError(f"{name} has {sizes}; choose a text-to-video checkpoint, whose only input are latents.")
    if config.get("extra_pos_embed_type"):
        raise UserError(f"{name} with learned positions is Cosmos 1, trained with EDM; choose Predict2 or 2.5.")
    if (config.get("num_frame_per_block") or 1) > 1:
        raise UserError(f"{name} processes frames in blocks, so an action would affect earlier frames.")
    for entry in ("inject_sample_info", "img_context_dim_in"):
        if config.get(entry):
            raise UserError(f"{name} requires further conditioning ({entry}), which is not supported.")
    return int(config["out_channels"])


def _per_token(features: Tensor, output: Tensor, axis: int | None) -> Tensor:
    """Arrange features of frames `(B, T, D)` like the tokens of a patch embedding."""
    if axis is None:
        return features.repeat_interleave(output.shape[1] // features.shape[1], 1)  # (B, T h w, D)
    return features[:, :, None, None] if axis == 1 else features.transpose(1, 2)[..., None, None]
