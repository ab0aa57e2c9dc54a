"""Training of the latent world model: first the autoencoder, then all other networks together.

`WorldLearner` implements the interface of an algorithm for the shared training loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.algorithms.common.algorithm import Metrics, make_metrics
from robopolicy.constraints import FractionBelowOne, NonNegative, Positive, PositiveInt, Validated
from robopolicy.core.distributed import average_gradients
from robopolicy.core.gradients import clip_gradients
from robopolicy.device import copy_to, move, restore_generator
from robopolicy.nets.module_state import EMA
from robopolicy.worldmodel.base import VideoSource
from robopolicy.worldmodel.latent import LatentWorldModel, to_float
from robopolicy.worldmodel.networks import AutoEncoder


@dataclass(frozen=True)
class LearnerConfig(Validated):
    """Training settings of the networks."""

    autoencoder_updates: PositiveInt = 4_000  # first updates, which only train the autoencoder
    updates: PositiveInt = 12_000  # later updates, of all other networks
    autoencoder_batch: PositiveInt = 16  # images; many small steps leave the first plateau sooner than few large ones
    autoencoder_lr: Positive = 2e-3  # falls linearly to a twentieth
    batch_size: PositiveInt = 64  # windows
    state_batch: PositiveInt = 256  # windows of state network and decoder, which cost far less than the denoiser
    state_horizon: PositiveInt = 8  # steps ahead for which the state network learns from its own predictions
    lr: Positive = 1e-3  # rises for 100 updates, then falls linearly to a tenth
    weight_decay: NonNegative = 0.01
    grad_clip: Positive = 1.0  # largest norm of the gradient
    ema: FractionBelowOne = 0.99  # largest decay of the weight average
    history_noise: NonNegative = 0.3  # largest standard deviation of noise on the context, relative to the latents
    latent_noise: NonNegative = 0.05  # standard deviation of the noise on the input of the decoder


@dataclass(frozen=True)
class FrameBatch:
    """Images for the autoencoder."""

    images: Tensor  # (B, 3, S, S) uint8, of any camera


@dataclass(frozen=True)
class LatentBatch:
    """Latents for denoiser, state network, state decoder and success head."""

    latents: Tensor  # (B, C + 1, Z, h, w) context and target
    proprio: Tensor  # (B, C + 1, P)
    actions: Tensor  # (B, C, A)
    state_latents: Tensor  # (S, Z, h, w) newest frames of the context of other windows
    state_proprio: Tensor  # (S, C + K, P) context and K targets
    state_actions: Tensor  # (S, C + K - 1, A)
    state_real: Tensor  # (S, K) whether a target is within the episode
    outcome_latents: Tensor  # (B, Z, h, w) other frames, for the success head
    outcome_proprio: Tensor  # (B, P)
    outcome: Tensor  # (B, 2) their success and progress


def autoencoder_loss(autoencoder: AutoEncoder, images: Tensor, noise: Tensor, scale: float) -> tuple[Tensor, Metrics]:
    """Squared error, weighted by the distance of a pixel from the image mean, plus a small penalty on latents."""
    image = to_float(images)
    latent = autoencoder.encode(image)
    error = (autoencoder.decode(latent + scale * noise) - image) ** 2
    weight = 1 + 4 * (image - image.mean((2, 3), keepdim=True)).abs()
    loss = (error * weight).mean() + 1e-3 * latent.pow(2).mean()
    return loss, make_metrics({"autoencoder/psnr": 10 * torch.log10(4 / error.detach().mean())})


def denoising_loss(
    model: LatentWorldModel, batch: LatentBatch, generator: torch.Generator, history_noise: float
) -> tuple[Tensor, Metrics]:
    """EDM loss of the change of the latents.

    The context is noisy and the change is relative to its newest frame, so that the model learns to correct errors.
    """
    size, device = len(batch.latents), batch.latents.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    level = torch.rand(size, generator=generator, device=device) * history_noise
    past, after = batch.latents[:, :-1], batch.latents[:, -1]
    past = past + level[:, None, None, None, None] * normal(*past.shape)
    proprio = _noisy_states(model, batch.proprio[:, :-1], level, normal)
    moved = model.normalised_change(proprio, batch.proprio[:, -1])
    change = (after - past[:, -1]) / model.change_std
    sigma = (1.2 * normal(size) - 0.4).exp().clamp(2e-3, 20.0)
    spread = sigma[:, None, None, None]
    given = *model.normalised(proprio, batch.actions), moved, model.expected_change(past, proprio, moved)
    clean = model.denoiser(change + spread * normal(*change.shape), sigma, past, *given)
    weight = (spread**2 + 1) / spread**2  # of EDM, for data of unit standard deviation
    loss = (weight * (clean - change) ** 2).mean()
    return loss, make_metrics({"denoiser/loss": loss})


def state_loss(
    model: LatentWorldModel, batch: LatentBatch, generator: torch.Generator, history_noise: float
) -> tuple[Tensor, Metrics]:
    """Huber loss of the normalised changes of the state vector, from a noisy context as in `denoising_loss`.

    A contact turns an object by many standard deviations, which nothing predicts: squared, such errors outweigh all
    others. Every step after the first starts from the predictions before it, with their gradient, and sees the same
    latent: later ones would show what the predictions missed. Errors of a few millimetres decide whether a grasp
    succeeds, and a network that learns single steps only does not correct them.
    """
    latent, device = batch.state_latents, batch.state_latents.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    level = torch.rand(len(latent), generator=generator, device=device) * history_noise
    features = model.state.look(latent + level[:, None, None, None] * normal(*latent.shape))
    context, horizon = model.spec.context, batch.state_real.shape[1]
    past = _noisy_states(model, batch.state_proprio[:, :context], level, normal)
    past, actions = model.normalised(past, batch.state_actions)
    offset, scale = (value / model.proprio_std for value in (model.proprio_change_mean, model.proprio_change_std))
    for step in range(horizon):
        moved = model.state(features, past[:, -context:], actions[:, step : step + context])
        after = torch.addcmul(past[:, -1] + offset, moved, scale)
        past = torch.cat([past, after[:, None]], 1)
    targets = model.normalised_state(batch.state_proprio[:, context:])
    changes, real = (past[:, context:] / scale, targets / scale), batch.state_real
    loss = (functional.huber_loss(*changes, reduction="none").mean(2) * real).sum() / real.sum()
    return loss, make_metrics({"state/loss": loss})


def state_decoder_loss(model: LatentWorldModel, batch: LatentBatch) -> tuple[Tensor, Metrics]:
    """Mean squared error of the latents that the state decoder expects."""
    newest = batch.state_proprio[:, model.spec.context - 1]
    loss = functional.mse_loss(model.decode_state(newest), batch.state_latents)
    return loss, make_metrics({"state_decoder/loss": loss})


def _noisy_states(model: LatentWorldModel, proprio: Tensor, level: Tensor, normal: Callable[..., Tensor]) -> Tensor:
    """Add noise of the size `level` `(B,)`, in typical changes, to past state vectors `(B, C, P)`."""
    return proprio + level[:, None, None] * model.proprio_change_std * normal(*proprio.shape)


def outcome_loss(model: LatentWorldModel, batch: LatentBatch) -> tuple[Tensor, Metrics]:
    """Cross-entropies of success and progress; a quarter of the latents is decoded and encoded again."""
    some = max(1, len(batch.outcome_latents) // 4)
    with torch.no_grad():
        again = model.encode(model.decode(batch.outcome_latents[:some]))
    latents = torch.cat([again, batch.outcome_latents[some:]])
    loss = functional.binary_cross_entropy_with_logits(
        model.outcome_logits(latents, batch.outcome_proprio), batch.outcome
    )
    return loss, make_metrics({"outcome/loss": loss})


class WorldLearner:
    """Trains a `LatentWorldModel`."""

    name = "worldmodel"
    data_source = "dataset"

    def __init__(self, config: LearnerConfig, model: LatentWorldModel, seed: int = 0) -> None:
        self.config, self.model = config, model
        self.updates = 0
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.ema = EMA(_predicting(model), config.ema)
        self.optimizers = {
            "autoencoder": torch.optim.AdamW(model.autoencoder.parameters(), config.autoencoder_lr),
            "dynamics": torch.optim.AdamW(_predicting(model).parameters(), config.lr, weight_decay=config.weight_decay),
        }
        model.autoencoder.requires_grad_(self.stage == "autoencoder")

    @property
    def total_updates(self) -> int:
        """Updates of both stages."""
        return self.config.autoencoder_updates + self.config.updates

    @property
    def stage(self) -> str:
        """Stage of the next update."""
        return "autoencoder" if self.updates < self.config.autoencoder_updates else "dynamics"

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        config = self.config
        if self.stage == "autoencoder":
            return config.autoencoder_lr * (1 - 0.95 * self.updates / config.autoencoder_updates)
        done = self.updates - config.autoencoder_updates
        return config.lr * min(1.0, (done + 1) / 100) * (1 - 0.9 * done / config.updates)

    def update(self, batch: FrameBatch | LatentBatch) -> Metrics:
        """Perform one gradient step on the networks that `batch` is for."""
        model, config, rate = self.model, self.config, self.rate()
        optimizer = self.optimizers[self.stage]
        for group in optimizer.param_groups:
            group["lr"] = rate
        if isinstance(batch, FrameBatch):
            shape = (len(batch.images), model.config.latent_channels, model.grid, model.grid)
            noise = torch.randn(shape, generator=self.generator, device=self.generator.device)
            loss, metrics = autoencoder_loss(model.autoencoder, batch.images, noise, config.latent_noise)
        else:
            loss, metrics = denoising_loss(model, batch, self.generator, config.history_noise)
            outcome, outcome_metrics = outcome_loss(model, batch)
            loss, metrics = loss + outcome, metrics | outcome_metrics
            if model.spec.proprio_dim:
                state, state_metrics = state_loss(model, batch, self.generator, config.history_noise)
                decoder, decoder_metrics = state_decoder_loss(model, batch)
                loss, metrics = loss + state + decoder, metrics | state_metrics | decoder_metrics
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        average_gradients(parameters)
        clip_gradients(parameters, config.grad_clip)
        optimizer.step()
        if isinstance(batch, LatentBatch):
            self.ema.update(_predicting(model))
        self.updates += 1
        return metrics | {"lr": rate}

    def inference_policy(self) -> LatentWorldModel:
        """Return a copy with the averaged weights, in evaluation mode."""
        averaged = copy.deepcopy(self.model).eval().requires_grad_(False)
        if self.stage == "dynamics":
            _predicting(averaged).load_state_dict(self.ema.module.state_dict())
        return averaged

    def state_dict(self) -> dict[str, Any]:
        """State of model, optimizers and random numbers."""
        return {
            "model": dict(self.model.state_dict()),
            "ema": dict(self.ema.state_dict()),
            **{name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "updates": self.updates,
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
        self.updates = int(state["updates"])
        restore_generator(self.generator, state["generator"])


def _predicting(model: LatentWorldModel) -> nn.ModuleList:
    """Return the networks of the second stage."""
    return nn.ModuleList([model.denoiser, model.state, model.state_decoder, model.outcome])


class StagedVideoSource(VideoSource):
    """Source of the batches of the current stage of a learner."""

    def encode(self, model: LatentWorldModel) -> Tensor:
        """Freeze the autoencoder, encode all frames and fit the latent statistics of the model."""
        model.latent_mean.zero_()
        model.latent_std.fill_(1.0)
        model.autoencoder.requires_grad_(False)
        videos, size = self.videos, 256
        with torch.no_grad():
            parts = [
                model.encode({camera: value[i : i + size] for camera, value in videos.images.items()}).cpu()
                for i in range(0, len(videos), size)
            ]
        return model.fit_latents(torch.cat(parts), videos.targets - 1, videos.targets)

    def next(self, algorithm: WorldLearner) -> FrameBatch | LatentBatch:
        """Return the next batch."""
        if algorithm.stage == "autoencoder":
            views = list(self.videos.images.values())
            chosen = self.sampler.frames(algorithm.config.autoencoder_batch)
            parts = [view[chosen[index :: len(views)]] for index, view in enumerate(views)]
            return FrameBatch(copy_to(torch.cat(parts), self.device))
        model, size = algorithm.model, algorithm.config.batch_size
        latents = self.latents(model)
        frames, actions, _ = self.videos.window(self.sampler.targets(size))
        parts = [latents[frames], self.videos.proprio[frames], actions]
        targets = self.sampler.targets(algorithm.config.state_batch)
        frames, actions, real = self.videos.window(targets, algorithm.config.state_horizon)
        parts += [latents[frames[:, model.spec.context - 1]], self.videos.proprio[frames], actions, real]
        parts += self.outcome_batch(model, size)
        return move(LatentBatch(*parts), self.device)
