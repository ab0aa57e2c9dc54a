"""Encoding of frames with autoencoders of diffusers, and a cache of the latents of a dataset.

Every frame is encoded separately. Video autoencoders (Wan, LTX) would otherwise merge four or eight frames; a separate
frame has its own latents, and so has its action. Wan's transformer was trained on merged frames and must adapt to this
in fine-tuning.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robopolicy.atomic import atomic_file
from robopolicy.errors import UserError, cannot_write, unknown_name
from robopolicy.worldmodel.contract import Images
from robopolicy.worldmodel.latent import to_float, to_uint8

VIDEO, IMAGE = 5, 4  # input axes of an autoencoder
AUTOENCODERS = {
    "AutoencoderKLWan": VIDEO,
    "AutoencoderKLLTXVideo": VIDEO,
    "AutoencoderKL": IMAGE,
    "AutoencoderTiny": IMAGE,
}


class FrameCodec(nn.Module):
    """Frozen autoencoder of diffusers for frames of all cameras, stacked vertically."""

    mean: Tensor
    std: Tensor

    def __init__(self, autoencoder: Any, cameras: tuple[str, ...], size: int) -> None:
        super().__init__()
        name = type(autoencoder).__name__
        if name not in AUTOENCODERS:
            raise unknown_name("autoencoder", name, AUTOENCODERS)
        if autoencoder.config.get("timestep_conditioning") or any(autoencoder.config.get("decoder_inject_noise") or ()):
            raise UserError(f"{name} adds noise in decoding (LTX from 0.9.1 on); choose one that does not.")
        self.axes, self.cameras = AUTOENCODERS[name], cameras
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        mean, std = _scale(autoencoder)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        try:
            black = torch.zeros(1, 3, size, size, device=mean.device)
            _, self.channels, height, self.width = self._encode(black).shape
        except RuntimeError as error:
            raise UserError(f"{name} cannot encode images of {size} pixels; choose another size.") from error
        self.height = height * len(cameras)
        decoded = self._decode(torch.zeros(1, self.channels, height, self.width, device=mean.device))
        if decoded.shape != black.shape:
            raise UserError(f"{name} does not restore {size} pixels; choose a multiple of its compression.")

    @torch.no_grad()
    def encode(self, images: Images) -> Tensor:
        """Frames `{camera: (B, 3, S, S)}` uint8 to latents `(B, Z, h, w)`."""
        views = [self._encode(to_float(images[camera].to(self.mean.device))) for camera in self.cameras]
        return (torch.cat(views, 2) - self.mean) / self.std

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Images:
        """Inverse of `encode`."""
        views = (latents * self.std + self.mean).chunk(len(self.cameras), 2)
        return {camera: to_uint8(self._decode(view)) for camera, view in zip(self.cameras, views, strict=True)}

    @torch.no_grad()
    def _encode(self, pictures: Tensor) -> Tensor:
        found = self.autoencoder.encode(pictures[:, :, None] if self.axes == VIDEO else pictures)
        latents = found.latents if hasattr(found, "latents") else found.latent_dist.mode()
        return latents[:, :, 0] if self.axes == VIDEO else latents

    @torch.no_grad()
    def _decode(self, latents: Tensor) -> Tensor:
        found = self.autoencoder.decode(latents[:, :, None] if self.axes == VIDEO else latents).sample
        return found[:, :, 0] if self.axes == VIDEO else found

    def fingerprint(self) -> str:
        """Return a digest of the weights and the layout of the frames."""
        digest = hashlib.sha256(repr((self.cameras, self.height, self.width)).encode())
        for key, value in self.state_dict().items():
            digest.update(key.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def _scale(autoencoder: Any) -> tuple[Tensor, Tensor]:
    """Return mean and scale `(Z, 1, 1)` of the latents for transformers that were trained on them."""
    config = autoencoder.config
    channels = int(config.get("z_dim") or config["latent_channels"])
    found = {
        **config,
        **dict(autoencoder.named_buffers()),
    }  # LTX stores them with its weights, Wan in its configuration
    mean, std = found.get("latents_mean"), found.get("latents_std")
    if mean is None or std is None:
        mean, std = config.get("shift_factor") or 0.0, 1.0
    scale = config.get("scaling_factor") or 1.0
    device = next(autoencoder.parameters()).device
    pair = [torch.as_tensor(value, dtype=torch.float32, device=device).flatten() for value in (mean, std)]
    if any(len(value) not in (1, channels) for value in pair):
        raise UserError(f"The autoencoder has {channels} channels, but statistics of {len(pair[0])}.")
    full = [value.expand(channels).reshape(-1, 1, 1).clone() for value in pair]
    return full[0], full[1] / float(scale)


@torch.no_grad()
def cached_latents(codec: FrameCodec, images: Images, folder: Path | None, size: int = 64) -> Tensor:
    """Return the latents `(F, Z, h, w)` of all frames `{camera: (F, 3, S, S)}` on the CPU, from `size` frames per call.

    They are cached in `folder` by a digest of frames and autoencoder; None disables the cache.
    """
    if folder is None:
        return _encoded(codec, images, size)
    digest = hashlib.sha256(codec.fingerprint().encode())
    for camera in codec.cameras:
        digest.update(camera.encode() + images[camera].contiguous().numpy().tobytes())
    file = folder / f"latents-{digest.hexdigest()[:24]}.safetensors"
    if file.is_file():
        try:
            return load_file(file)["latents"]
        except (OSError, KeyError, SafetensorError) as error:
            raise UserError(f"{file} is damaged; delete it.") from error
    latents = _encoded(codec, images, size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    with atomic_file(file) as temporary:
        save_file({"latents": latents}, temporary)
    return latents


def _encoded(codec: FrameCodec, images: Images, size: int) -> Tensor:
    count = len(images[codec.cameras[0]])
    parts = [
        codec.encode({camera: images[camera][start : start + size] for camera in codec.cameras}).cpu()
        for start in range(0, count, size)
    ]
    return torch.cat(parts).contiguous()
