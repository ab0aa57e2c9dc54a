"""Training of a pretrained world model: flow matching on latent films whose past is given, a little disturbed.

`PretrainedLearner` speaks like an algorithm, so that the one training loop runs it. Only what may learn does: the
transformer or its low-rank updates, what reads the actions, the state vector's head and the judge; never the
autoencoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robopolicy.constraints import FractionBelowOne, NonNegative, Positive, PositiveInt, Validated
from robopolicy.worldmodel.base import VideoSource
from robopolicy.worldmodel.pretrained.codec import cached_latents
from robopolicy.worldmodel.pretrained.model import AdapterConfig, PretrainedWorldModel, open_pretrained, shifted
from robopolicy.worldmodel.videos import VideoDataset

Metrics = dict[str, float]


@dataclass(frozen=True)
class PretrainedLearnerConfig(Validated):
    """How a pretrained model learns to follow actions."""

    updates: PositiveInt = 10_000  # gradient steps
    batch_size: PositiveInt = 8  # windows
    lr: Positive = 1e-4  # rises for 100 updates, then falls linearly to a tenth
    weight_decay: NonNegative = 0.01
    grad_clip: Positive = 1.0  # largest norm of the gradient
    history_noise: FractionBelowOne = (
        0.1  # largest share of noise in the frames that are given; the model is told how much
    )


@dataclass(frozen=True)
class PretrainedTrainConfig:
    """A pretrained model in place of the small one."""

    source: str = ""  # folder of diffusers, or hub:OWNER/NAME, which is downloaded; empty trains the small model
    autoencoder: str = ""  # likewise, whose autoencoder is taken instead of that of `source`
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    learner: PretrainedLearnerConfig = field(default_factory=PretrainedLearnerConfig)
    cache: str = ""  # folder that keeps latents of films between runs; empty keeps none


@dataclass(frozen=True)
class VideoLatentBatch:
    """Windows of latent films, and frames to judge."""

    latents: Tensor  # (B, C + k, Z, h, w) context and what follows
    proprio: Tensor  # (B, C + k, P)
    actions: Tensor  # (B, C + k - 1, A)
    real: Tensor  # (B, k) bool, whether a frame that follows was filmed
    judged: Tensor  # (B, Z, h, w) other frames
    judged_proprio: Tensor  # (B, P)
    outcome: Tensor  # (B, 2) success and progress they show


def flow_loss(
    model: PretrainedWorldModel, batch: VideoLatentBatch, generator: torch.Generator, history_noise: float
) -> tuple[Tensor, Metrics]:
    """Squared error of the velocity of the frames that follow, and of the change of the state vector."""
    data, (size, future), device = batch.latents, batch.real.shape, batch.latents.device
    context = data.shape[1] - future
    noise = torch.randn(data.shape, generator=generator).to(device)
    level = torch.rand(size, 1, generator=generator) * history_noise
    share = shifted(torch.randn(size, 1, generator=generator).sigmoid(), model.config.adapter.shift)
    time = 1 - torch.cat([level.expand(-1, context), share.expand(-1, future)], 1).to(device)
    mixing = time[..., None, None, None]
    velocity = model.velocity(mixing * data + (1 - mixing) * noise, time, batch.actions)[:, context:]
    error = (velocity - (data - noise)[:, context:]).pow(2).flatten(2).mean(2)
    flow = (error * batch.real).sum() / batch.real.sum()
    before, after = slice(context - 1, -1), slice(context, None)
    pairs = [data[:, before], data[:, after], batch.proprio[:, before], batch.actions[:, before.start :]]
    predicted = model.state_change(*(part.flatten(0, 1) for part in pairs))
    moved = (batch.proprio[:, after] - batch.proprio[:, before] - model.proprio_change_mean) / model.proprio_change_std
    missed = (predicted - moved.flatten(0, 1))[batch.real.flatten()].pow(2)
    state = missed.mean() if missed.numel() else flow.new_zeros(())
    return flow + state, {"flow/loss": float(flow.detach()), "state/loss": float(state.detach())}


def outcome_loss(model: PretrainedWorldModel, batch: VideoLatentBatch) -> tuple[Tensor, Metrics]:
    """Cross-entropies of success and progress."""
    logits = model.judged(batch.judged, batch.judged_proprio)
    loss = functional.binary_cross_entropy_with_logits(logits, batch.outcome)
    return loss, {"outcome/loss": float(loss.detach())}


class PretrainedLearner:
    """Trains a `PretrainedWorldModel`."""

    name = "worldmodel"
    data_source = "dataset"
    stage = "dynamics"  # the only one

    def __init__(self, config: PretrainedLearnerConfig, model: PretrainedWorldModel, seed: int = 0) -> None:
        self.config, self.model = config, model
        self.updates = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.learning = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.optimizer = torch.optim.AdamW(self.learning.values(), config.lr, weight_decay=config.weight_decay)

    @property
    def total_updates(self) -> int:
        """Budget."""
        return self.config.updates

    def rate(self) -> float:
        """Learning rate of the next update."""
        return self.config.lr * min(1.0, (self.updates + 1) / 100) * (1 - 0.9 * self.updates / self.config.updates)

    def update(self, batch: VideoLatentBatch) -> Metrics:
        """One gradient step."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, metrics = flow_loss(self.model, batch, self.generator, self.config.history_noise)
        judging, judged = outcome_loss(self.model, batch)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + judging).backward()
        nn.utils.clip_grad_norm_(self.learning.values(), self.config.grad_clip)
        self.optimizer.step()
        self.updates += 1
        return metrics | judged | {"lr": rate}

    def inference_policy(self) -> PretrainedWorldModel:
        """The model itself, not a copy: it may be large, and is always in evaluation mode."""
        return self.model.eval()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides future updates; what is frozen comes from the pretrained model again."""
        own = dict(self.model.named_buffers(recurse=False))
        return {
            "learning": {name: value.detach() for name, value in self.learning.items()},
            "statistics": own,
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
            "generator": self.generator.get_state(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for kind, found in (("learning", self.learning), ("statistics", dict(self.model.named_buffers(recurse=False)))):
            if state[kind].keys() != found.keys():
                raise ValueError(f"The state is of another model: its {kind} differ.")
            for name, value in found.items():
                value.copy_(state[kind][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])
        self.generator.set_state(state["generator"])


class CachedVideoSource(VideoSource):
    """Batches of windows; latents that an earlier run kept in the folder `cache` are found there."""

    def __init__(self, films: VideoDataset, device: torch.device, seed: int = 0, cache: Path | None = None) -> None:
        super().__init__(films, device, seed)
        self.cache = cache

    def encode(self, model: PretrainedWorldModel) -> Tensor:
        """With the autoencoder of the pretrained model."""
        return cached_latents(model.codec, self.films.images, self.cache)

    def next(self, algorithm: PretrainedLearner) -> VideoLatentBatch:
        """The next batch."""
        model, films, size = algorithm.model, self.films, algorithm.config.batch_size
        latents = self.latents(model)
        frames, actions, real = films.window(self.sampler.targets(size), films.spec.frames_per_call)
        parts = (latents[frames], films.proprio[frames], actions, real, *self.judged(model, size))
        return VideoLatentBatch(*(part.to(self.device) for part in parts))


def parts_of(
    config: PretrainedTrainConfig, films: VideoDataset, device: torch.device, seed: int
) -> tuple[PretrainedLearner, CachedVideoSource]:
    """What a run consists of.

    Raises:
        UserError: As in `open_pretrained`.
    """
    model = open_pretrained(config.source, films.spec, config.adapter, autoencoder=config.autoencoder).to(device)
    cache = Path(config.cache) if config.cache else None
    return PretrainedLearner(config.learner, model, seed), CachedVideoSource(films, device, seed, cache)
