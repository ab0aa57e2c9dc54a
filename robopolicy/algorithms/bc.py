"""Behaviour cloning: supervised imitation of demonstrated action chunks.

Any policy with `imitation_loss` can be cloned: a flow head regresses velocities (conditional flow matching), a Gaussian
head maximises likelihood. Averaged (EMA) weights are evaluated and saved, with the decay schedule of the reference
implementation of Diffusion Policy (Chi et al. 2023).

Use it to train a base policy from demonstrations. To exceed the demonstrator, fine-tune the result with RL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, make_metrics
from robopolicy.constraints import FractionBelowOne, NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.core.distributed import average_gradients
from robopolicy.core.gradients import backward, clip_gradients
from robopolicy.data.chunks import ChunkBatch
from robopolicy.nets.augmentation import augmentation_loss, set_augmentation_progress
from robopolicy.nets.module_state import EMA
from robopolicy.policies.base import Info, Policy


@dataclass(frozen=True)
class BCConfig(Validated):
    """Settings of behaviour cloning."""

    lr: Positive = 1e-3  # peak learning rate of AdamW
    weight_decay: NonNegative = 1e-6  # decoupled weight decay
    beta1: FractionBelowOne = 0.95  # AdamW momentum
    beta2: FractionBelowOne = 0.999  # AdamW second-moment decay
    warmup: NonNegativeInt = 100  # updates of linear warm-up, followed by cosine decay to 0 at the last update
    grad_clip: Positive = 1.0  # largest gradient norm
    batch_size: PositiveInt = 256  # chunks per update
    ema: bool = True  # evaluate and save averaged weights


def bc_loss(policy: Policy, batch: ChunkBatch, generator: torch.Generator | None = None) -> tuple[Tensor, Info]:
    """Mean imitation loss of a batch of chunks plus the losses of learned augmentations, and metrics."""
    loss, info = policy.imitation_loss(batch.obs, batch.chunk, batch.weight, mask=batch.mask, generator=generator)
    return loss.mean() + augmentation_loss(policy, loss), info


class BC(Algorithm):
    """Behaviour cloning of chunks from a dataset."""

    name = "bc"
    config_class = BCConfig
    data_source = "dataset"
    heads = ("imitation_loss",)
    reference = "chi2023diffusion"
    distributed = True

    def __init__(self, config: BCConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` for `total_updates` gradient steps."""
        super().__init__(policy, total_updates=total_updates)
        self.config = config
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.ema = EMA(policy) if config.ema else None

    def loss(self, batch: ChunkBatch) -> tuple[Tensor, Info]:
        """Loss of a gradient step, and metrics; distillation and reflow override it."""
        set_augmentation_progress(self.policy, self.progress)
        return bc_loss(self.policy, batch)

    def update(self, batch: ChunkBatch) -> Metrics:
        """Take a gradient step on a batch of chunks."""
        self.policy.train()
        self.policy.set_progress(self.progress)
        rate = self.config.lr * warmup_cosine(self.updates, self.config.warmup, self.total_updates)
        self.optimizer.param_groups[0]["lr"] = rate
        loss, info = self.loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        backward(loss)
        average_gradients(list(self.policy.parameters()))
        norm = clip_gradients(self.policy.parameters(), self.config.grad_clip)
        self.optimizer.step()
        self.updates += 1
        if self.ema is not None:
            self.ema.update(self.policy)
        stats = {"loss": loss, "grad_norm": norm, "lr": rate, **{key: value.mean() for key, value in info.items()}}
        return make_metrics({f"actor/{key}": value for key, value in stats.items()})

    def inference_policy(self) -> Policy:
        """The averaged policy, or the trained one without averaging."""
        return self.policy if self.ema is None else self.ema.module

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Network, its average and the optimiser."""
        average = {} if self.ema is None else {"ema": self.ema}
        return {"policy": self.policy, "optimizer": self.optimizer, **average}


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Learning-rate factor: linear from 0 over `warmup` updates, then cosine to 0 at `total`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.5 * (1.0 + math.cos(progress * math.pi))
