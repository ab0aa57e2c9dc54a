"""CDSA: networks that move a frozen policy's actions closer to the data (Liu et al. 2024).

Four small networks are fitted to the transitions of a dataset: the scores of its actions and of its states by denoising
score matching, an inverse model and a forward model. The policy itself does not change; the deployed policy corrects
its actions (`robopolicy.contrib.offline.corrected`, which documents formula and limits).

Use it on a policy with out-of-distribution actions, above all after offline reinforcement learning, where mistakes are
expensive. It has no effect on a policy that was just imitated. Choose the strength of the correction after training, on
separate seeds (`CorrectedPolicy.with_correction`).

Deviations: reconstructed, no code was published. One noise level per score; an action is the executed part of a chunk,
and the next state the one after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.bc import warmup_cosine
from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.off_policy import optimizer_step
from robopolicy.constraints import NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.contrib.offline.corrected import (
    CorrectedPolicy,
    Correction,
    DataModel,
    DataModelConfig,
    correct,
    data_model_loss,
)
from robopolicy.data.chunks import ChunkBatch
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Policy


@dataclass(frozen=True)
class CDSAConfig(Validated):
    """Settings of CDSA."""

    model: DataModelConfig = field(default_factory=DataModelConfig)  # networks and noise levels
    correction: Correction = field(default_factory=Correction)  # of the deployed policy; training does not depend on it
    lr: Positive = 1e-3  # peak learning rate of Adam
    warmup: NonNegativeInt = 100  # updates of linear warm-up, followed by cosine decay to 0 at the last update
    grad_clip: Positive = 1.0  # largest gradient norm
    batch_size: PositiveInt = 256  # chunks per update
    seed: NonNegativeInt = 0  # of the noise


def cdsa_loss(model: DataModel, batch: ChunkBatch, generator: torch.Generator | None = None) -> tuple[Tensor, Info]:
    """Sum of the four losses on a batch of chunks with their next observations."""
    if batch.next_obs is None or batch.next_obs_valid is None:
        raise UserError(
            "CDSA needs chunks with the observations after them; sample with lookahead_steps=action_horizon."
        )
    return data_model_loss(
        model, batch.obs, batch.chunk, batch.next_obs, batch.next_obs_valid, generator, executed=batch.executed
    )


class CDSA(Algorithm):
    """Fits a `DataModel` to a dataset around a frozen copy of the policy."""

    name: ClassVar[str] = "cdsa"
    config_class = CDSAConfig
    data_source = "dataset"
    heads = ("imitation_loss",)
    reference = "liu2024cdsa"
    requires_pretrained = True
    policy: CorrectedPolicy

    def __init__(self, config: CDSAConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to correct a frozen copy of `policy`, or to resume with a corrected one."""
        base, model = policy, None
        if isinstance(policy, CorrectedPolicy):
            base, model = policy.base, policy.model
            if model.config != config.model:
                raise UserError(f"The policy is corrected by {model.config}; set algorithm.model to the same.")
        if model is None:
            model = DataModel(config.model, base)
        corrected = correct(frozen_copy(base), model, config.correction)
        super().__init__(corrected, total_updates=total_updates, seed=config.seed)
        self.config = config
        self.lookahead_steps = base.spec.action_horizon
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, fused=True)

    def update(self, batch: ChunkBatch) -> Metrics:
        """Take one gradient step on a batch of chunks."""
        self.policy.train()
        rate = self.config.lr * warmup_cosine(self.updates, self.config.warmup, self.total_updates)
        self.optimizer.param_groups[0]["lr"] = rate
        loss, info = cdsa_loss(self.policy.model, batch, self.generator)
        optimizer_step(self.optimizer, loss, self.policy.model, self.config.grad_clip)
        self.updates += 1
        metrics = {"model/loss": loss.item(), "model/lr": rate}
        return metrics | {f"model/{key}": value.item() for key, value in info.items()}

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The policy with its networks, and their optimiser."""
        return {"policy": self.policy, "optimizer": self.optimizer}
