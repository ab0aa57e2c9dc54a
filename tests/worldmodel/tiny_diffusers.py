"""Tiny instances of diffusers classes with random weights, saved in the layout of diffusers pipelines."""

from pathlib import Path
from typing import Any

import diffusers
import torch

from robopolicy.worldmodel.contract import WorldSpec

SPEC = WorldSpec(("top",), 16, 10.0, action_dim=2, proprio_dim=3, context=2, frames_per_call=2)
_NET = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 2}
_WAN = {**_NET, "patch_size": (1, 2, 2), "text_dim": 8, "freq_dim": 16, "ffn_dim": 32}
_COSMOS = {**_NET, "mlp_ratio": 2.0, "text_embed_dim": 8, "adaln_lora_dim": 4, "max_size": (8, 16, 16)}
_COSMOS |= {"extra_pos_embed_type": None}
_PROJECTED = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 6, "encoder_hidden_states_channels": 8}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("WanTransformer3DModel", _WAN),
    "skyreels": ("SkyReelsV2Transformer3DModel", _WAN),
    "ltx": ("LTXVideoTransformer3DModel", {**_NET, "cross_attention_dim": 24, "caption_channels": 8}),
    "cosmos": ("CosmosTransformer3DModel", {**_COSMOS, "concat_padding_mask": False}),
    "cosmos_masks": ("CosmosTransformer3DModel", {**_COSMOS, **_PROJECTED, "in_channels": 5}),
}
_CONVOLUTIONS = {"base_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
_LTX = {
    "block_out_channels": (8, 8),
    "decoder_block_out_channels": (8, 8),
    "layers_per_block": (1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1),
    "spatio_temporal_scaling": (True, False),
    "decoder_spatio_temporal_scaling": (True, False),
    "decoder_inject_noise": (False, False, False),
    "upsample_residual": (False, False),
    "upsample_factor": (1, 1),
    "patch_size": 2,
}
AUTOENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": (
        "AutoencoderKLWan",
        {**_CONVOLUTIONS, "z_dim": 4, "latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 0.5, 4.0]},
    ),
    "tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
            "latent_channels": 4,
        },
    ),
    "kl": (
        "AutoencoderKL",
        {
            "block_out_channels": (8, 8),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
            "latent_channels": 4,
            "scaling_factor": 0.5,
        },
    ),
    "ltx": ("AutoencoderKLLTXVideo", {**_LTX, "latent_channels": 4}),
}


def build(which: tuple[str, dict[str, Any]], seed: int = 0) -> Any:
    """Returns one network."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(diffusers, which[0])(**which[1]).eval()


def write(folder: Path, transformer: str = "wan", autoencoder: str = "tiny") -> Path:
    """Saves a transformer and an autoencoder, and returns their folder."""
    build(TRANSFORMERS[transformer]).save_pretrained(folder / "transformer")
    build(AUTOENCODERS[autoencoder], 1).save_pretrained(folder / "vae")
    return folder
