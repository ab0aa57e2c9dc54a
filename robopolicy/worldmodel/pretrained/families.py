"""The video transformers of diffusers that can be told actions: how each is called, and where the actions enter.

None is forked: forward hooks, present only while the network runs, add what an action says for its frame to the output
of a module, or hand it to the cross-attention. So names of parameters stay those of the checkpoint.

diffusers' networks count from data to noise and predict noise - data; `ActionConditionedTransformer.velocity` speaks
the house's language (time 0 is noise, 1 is data, velocity = data - noise), with a time of its own for every frame. A
transformer must have been trained with rectified flow, as all of these were (Cosmos from Predict2 on, whose scaling
amounts to it).
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
    """A class of diffusers."""

    time: str  # module that makes the timestep embedding
    output: int  # which of its outputs modulates the blocks
    modulations: int  # vectors of the network's width in that output
    patch: str  # module that makes tokens of latents
    frame_axis: int | None  # of that module's output; None where frames, rows and columns share axis 1
    text: str  # entry of the config: width of an embedded word
    blocks: str | None  # whose `attn2` may be handed one action per frame; None where that was not built
    pure_noise: float  # timestep of pure noise
    call: Callable[[nn.Module, Tensor, Tensor, Tensor, int], Tensor]  # network, latents, timesteps, text, given


def _tokens(x: Tensor, times: Tensor, patch: tuple[int, int]) -> Tensor:
    """Timesteps of frames `(B, T)` as those of tokens `(B, T h w)`."""
    return times.repeat_interleave((x.shape[3] // patch[0]) * (x.shape[4] // patch[1]), 1)


def _wan(network: Any, x: Tensor, times: Tensor, text: Tensor, given: int) -> Tensor:
    times = _tokens(x, times, network.config.patch_size[1:])
    return network(x, timestep=times, encoder_hidden_states=text, return_dict=False)[0]


def _skyreels(network: Any, x: Tensor, times: Tensor, text: Tensor, given: int) -> Tensor:
    told = {"timestep": times, "encoder_hidden_states": text}
    return network(x, **told, enable_diffusion_forcing=True, return_dict=False)[0]


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
    if network.config.in_channels > network.config.out_channels:  # video to world: which frames are given
        mask = torch.zeros_like(x[:, :1])
        mask[:, :, :given] = 1
        x = torch.cat([x, mask], 1)
    wanted = network.patch_embed.proj.in_features // math.prod(network.config.patch_size)
    x = functional.pad(x, (0, 0, 0, 0, 0, 0, 0, wanted - x.shape[1]))  # a padding mask says that nothing is padded
    told = {"timestep": times[:, None, :, None, None], "encoder_hidden_states": text}
    return network(x, **told, return_dict=False)[0]


FAMILIES = {
    "WanTransformer3DModel": Family("condition_embedder", 1, 6, "patch_embedding", 2, "text_dim", "blocks", 1e3, _wan),
    "SkyReelsV2Transformer3DModel": Family(
        "condition_embedder", 1, 6, "patch_embedding", 2, "text_dim", "blocks", 1e3, _skyreels
    ),
    "LTXVideoTransformer3DModel": Family("time_embed", 0, 6, "proj_in", None, "caption_channels", None, 1e3, _ltx),
    "CosmosTransformer3DModel": Family("time_embed", 0, 3, "patch_embed", 1, "text_embed_dim", None, 1.0, _cosmos),
}


def build(config: dict[str, Any], known: dict[str, Any], kind: str) -> Any:
    """A freshly initialised module of diffusers from its configuration.

    Raises:
        UserError: diffusers is missing, its class is not one of `known`, or the configuration does not fit it.
    """
    name = config.get("_class_name", "")
    if name not in known:
        raise unknown_name(kind, str(name), known)
    cls = getattr(require("diffusers", EXTRA), name)
    try:
        return cls.from_config(config)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"The configuration of the {kind} {name} is not one of diffusers: {error}") from error


class ActionConditionedTransformer(nn.Module):
    """A video transformer of diffusers that is told one action per frame.

    The last layer of what reads the actions is zero at first, so that nothing changes until it is trained:

    * `modulation`: the action is added to the timestep embedding of its frame (IRASim's and WorldGym's way).
    * `tokens`: the words that a frame attends to are joined by one for its action (Ctrl-World's way).
    * `channels`: what a widened, zero-initialised patch embedding makes of channels that repeat features of the action
      in every pixel of its frame is added to the tokens of that frame.

    The text is nothing (one word of zeros).
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
        if network.config.get("concat_padding_mask"):  # diffusers would resize one with torchvision; `_cosmos` adds it
            network.register_to_config(concat_padding_mask=False)
        projected = network.config.get("use_crossattn_projection")  # Cosmos-Predict2.5 reads longer words
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
        """Velocity, data - noise, of latents.

        Args:
            x: Latents, more or less noisy, `(B, T, Z, h, w)`.
            time: Of each frame, `(B, T)`: 0 is noise, 1 is data.
            actions: That led to each frame, normalised, `(B, T, A)`; None runs the network as it came.
            given: Frames that are known, the first ones; some networks have a channel that says so.
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

    def _hooks(self, told: Tensor) -> list[Any]:
        """Hooks that bring `told` `(B, T, D)` to its place."""
        family, network = self.family, self.network
        if self.conditioning == "modulation":

            def modulate(module: nn.Module, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
                """Outputs of a timestep embedding count frames or tokens."""
                parts = list(output)
                found = parts[family.output]
                each = found.numel() // told.numel()
                parts[family.output] = found + told.repeat_interleave(each, 1).reshape(found.shape).to(found.dtype)
                return tuple(parts)

            return [network.get_submodule(family.time).register_forward_hook(modulate)]
        if self.conditioning == "channels":

            def add(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                return output + _spread(told, output, family.frame_axis).to(output.dtype)

            return [network.get_submodule(family.patch).register_forward_hook(add)]
        return self._attend(told)

    def _attend(self, told: Tensor) -> list[Any]:
        """Hooks that let every frame attend to the text and to its own action."""
        frames, text_embedder = told.shape[1], self.network.get_submodule(f"{self.family.time}.text_embedder")
        words = text_embedder(told).flatten(0, 1)[:, None]  # (B T, 1, inner)

        def apart(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
            hidden, text, *rest = inputs
            hidden = hidden.unflatten(1, (frames, -1)).flatten(0, 1)  # (B T, h w, inner)
            text = torch.cat([text.repeat_interleave(frames, 0), words.to(text.dtype)], 1)
            return hidden, text, *rest

        def together(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output.unflatten(0, (-1, frames)).flatten(1, 2)

        attentions = [block.attn2 for block in self.network.get_submodule(str(self.family.blocks))]
        before = [attention.register_forward_pre_hook(apart) for attention in attentions]
        return before + [attention.register_forward_hook(together) for attention in attentions]


def _check(name: str, config: Any) -> int:
    """Channels of the latents of a transformer.

    Raises:
        UserError: It merges frames, or wants more than latents.
    """
    patch = config["patch_size"]
    if (patch[0] if isinstance(patch, list | tuple) else config["patch_size_t"]) != 1:
        raise UserError(f"{name} merges frames (temporal patches), so an action has no frame of its own.")
    if config["in_channels"] - config["out_channels"] not in ((0, 1) if "max_size" in config else (0,)):
        sizes = f"{config['in_channels']} channels and predicts {config['out_channels']}"
        raise UserError(f"{name} reads {sizes}; choose a checkpoint that continues latents alone (text to video).")
    if config.get("extra_pos_embed_type"):
        raise UserError(f"{name} with learnt positions is Cosmos 1, trained with EDM; choose Predict2 or 2.5.")
    if (config.get("num_frame_per_block") or 1) > 1:
        raise UserError(f"{name} sees frames in blocks, so an action would reach frames before its own.")
    for entry in ("inject_sample_info", "img_context_dim_in"):
        if config.get(entry):
            raise UserError(f"{name} wants to be told more than actions ({entry}), which is not supported.")
    return int(config["out_channels"])


def _spread(told: Tensor, output: Tensor, axis: int | None) -> Tensor:
    """Vectors of frames `(B, T, D)` in the layout of the tokens of a patch embedding."""
    if axis is None:
        return told.repeat_interleave(output.shape[1] // told.shape[1], 1)  # (B, T h w, D)
    return told[:, :, None, None] if axis == 1 else told.transpose(1, 2)[..., None, None]
