"""Training of a pretrained world model by flow matching on windows of latents with a slightly noisy context.

`PretrainedLearner` implements the interface of an algorithm for the shared training loop. It trains the transformer or
its low-rank updates, the action encoder, the state head and the success head, but not the autoencoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.algorithms.common.algorithm import Metrics, make_metrics
from robopolicy.constraints import FractionBelowOne, NonNegative, Positive, PositiveInt, Validated
from robopolicy.device import move, restore_generator
from robopolicy.worldmodel.base import VideoSource
from robopolicy.worldmodel.pretrained.codec import cached_latents
from robopolicy.worldmodel.pretrained.model import AdapterConfig, PretrainedWorldModel, open_pretrained, shifted
from robopolicy.worldmodel.videos import VideoDataset


@dataclass(frozen=True)
class PretrainedLearnerConfig(Validated):
    """Training settings of a pretrained model."""

    updates: PositiveInt = 10_000  # gradient steps
    batch_size: PositiveInt = 8  # windows
    lr: Positive = 1e-4  # rises for 100 updates, then falls linearly to a tenth
    weight_decay: NonNegative = 0.01
    grad_clip: Positive = 1.0  # largest norm of the gradient
    history_noise: FractionBelowOne = 0.1  # largest noise level of the context, which the model receives as its time


@dataclass(frozen=True)
class PretrainedTrainConfig:
    """Settings of a pretrained model, which replaces the small one."""

    source: str = ""  # diffusers folder, or hub:OWNER/NAME, which is downloaded; empty trains the small model
    autoencoder: str = ""  # folder or hub:OWNER/NAME of another autoencoder
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    learner: PretrainedLearnerConfig = field(default_factory=PretrainedLearnerConfig)
    cache: str = ""  # folder of cached latents; empty disables the cache


@dataclass(frozen=True)
class VideoLatentBatch:
    """Windows of latents, and frames for the success head."""

    latents: Tensor  # (B, C + k, Z, h, w) context and future
    proprio: Tensor  # (B, C + k, P)
    actions: Tensor  # (B, C + k - 1, A)
    real: Tensor  # (B, k) bool, whether a future frame is recorded and not padding
    outcome_latents: Tensor  # (B, Z, h, w) other frames, for the success head
    outcome_proprio: Tensor  # (B, P)
    outcome: Tensor  # (B, 2) their success and progress


def flow_loss(
    model: PretrainedWorldModel, batch: VideoLatentBatch, generator: torch.Generator, history_noise: float
) -> tuple[Tensor, Metrics]:
    """Squared error of the velocity of the future frames, and of the change of the state vector."""
    data, (size, future), device = batch.latents, batch.real.shape, batch.latents.device
    context = data.shape[1] - future
    noise = torch.randn(data.shape, generator=generator, device=device)
    level = torch.rand(size, 1, generator=generator, device=device) * history_noise
    share = shifted(torch.randn(size, 1, generator=generator, device=device).sigmoid(), model.config.adapter.shift)
    time = 1 - torch.cat([level.expand(-1, context), share.expand(-1, future)], 1)
    mixing = time[..., None, None, None]
    velocity = model.velocity(mixing * data + (1 - mixing) * noise, time, batch.actions)[:, context:]
    error = (velocity - (data - noise)[:, context:]).pow(2).flatten(2).mean(2)
    flow = (error * batch.real).sum() / batch.real.sum()
    before, after = slice(context - 1, -1), slice(context, None)
    pairs = [data[:, before], data[:, after], batch.proprio[:, before], batch.actions[:, before.start :]]
    predicted = model.state_change(*(part.flatten(0, 1) for part in pairs))
    moved = (batch.proprio[:, after] - batch.proprio[:, before] - model.proprio_change_mean) / model.proprio_change_std
    errors = (predicted - moved.flatten(0, 1))[batch.real.flatten()].pow(2)
    state = errors.mean() if errors.numel() else flow.new_zeros(())
    return flow + state, make_metrics({"flow/loss": flow, "state/loss": state})


def outcome_loss(model: PretrainedWorldModel, batch: VideoLatentBatch) -> tuple[Tensor, Metrics]:
    """Cross-entropies of success and progress."""
    logits = model.outcome_logits(batch.outcome_latents, batch.outcome_proprio)
    loss = functional.binary_cross_entropy_with_logits(logits, batch.outcome)
    return loss, make_metrics({"outcome/loss": loss})


class PretrainedLearner:
    """Trains a `PretrainedWorldModel`."""

    name = "worldmodel"
    data_source = "dataset"
    stage = "dynamics"  # the only stage

    def __init__(self, config: PretrainedLearnerConfig, model: PretrainedWorldModel, seed: int = 0) -> None:
        self.config, self.model = config, model
        self.updates = 0
        self.generator = torch.Generator(model.device).manual_seed(seed)
        self.learning = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.optimizer = torch.optim.AdamW(self.learning.values(), config.lr, weight_decay=config.weight_decay)

    @property
    def total_updates(self) -> int:
        """Number of updates."""
        return self.config.updates

    def rate(self) -> float:
        """Return the learning rate of the next update."""
        return self.config.lr * min(1.0, (self.updates + 1) / 100) * (1 - 0.9 * self.updates / self.config.updates)

    def update(self, batch: VideoLatentBatch) -> Metrics:
        """Perform one gradient step."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, metrics = flow_loss(self.model, batch, self.generator, self.config.history_noise)
        outcome, outcome_metrics = outcome_loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + outcome).backward()
        nn.utils.clip_grad_norm_(self.learning.values(), self.config.grad_clip)
        self.optimizer.step()
        self.updates += 1
        return metrics | outcome_metrics | {"lr": rate}

    def inference_policy(self) -> PretrainedWorldModel:
        """Return the model, which may be large, without a copy; it is always in evaluation mode."""
        return self.model.eval()

    def state_dict(self) -> dict[str, Any]:
        """State of trained weights, statistics, optimizer and random numbers; frozen weights come from the source."""
        return {
            "learning": {name: value.detach() for name, value in self.learning.items()},
            "statistics": dict(self.model.named_buffers(recurse=False)),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "generator": self.generator.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for kind, found in (("learning", self.learning), ("statistics", dict(self.model.named_buffers(recurse=False)))):
            if state[kind].keys() != found.keys():
                raise ValueError(f"The state belongs to another model: its {kind} differ.")
            for name, value in found.items():
                value.copy_(state[kind][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
        restore_generator(self.generator, state["generator"])


class CachedVideoSource(VideoSource):
    """Source of batches of windows, with a cache of latents in the folder `cache`."""

    def __init__(self, videos: VideoDataset, device: torch.device, seed: int = 0, cache: Path | None = None) -> None:
        super().__init__(videos, device, seed)
        self.cache = cache

    def encode(self, model: PretrainedWorldModel) -> Tensor:
        """Return the latents of the pretrained autoencoder, cached between runs."""
        return cached_latents(model.codec, self.videos.images, self.cache)

    def next(self, algorithm: PretrainedLearner) -> VideoLatentBatch:
        """Return the next batch."""
        model, videos, size = algorithm.model, self.videos, algorithm.config.batch_size
        latents = self.latents(model)
        frames, actions, real = videos.window(self.sampler.targets(size), videos.spec.frames_per_call)
        parts = (latents[frames], videos.proprio[frames], actions, real, *self.outcome_batch(model, size))
        return move(VideoLatentBatch(*parts), self.device)


def build_pretrained(
    config: PretrainedTrainConfig, videos: VideoDataset, device: torch.device, seed: int
) -> tuple[PretrainedLearner, CachedVideoSource]:
    """Create the learner and the data source of a run, with the errors of `open_pretrained`."""
    model = open_pretrained(config.source, videos.spec, config.adapter, autoencoder=config.autoencoder).to(device)
    cache = Path(config.cache) if config.cache else None
    return PretrainedLearner(config.learner, model, seed), CachedVideoSource(videos, device, seed, cache)
