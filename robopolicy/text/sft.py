"""Supervised fine-tuning on solved conversations, and the optimizer that all text algorithms share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics
from robopolicy.constraints import FractionBelowOne, NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy
from robopolicy.text.policy import TextPolicy


@dataclass(frozen=True)
class TextLearnerConfig(Validated):
    """Settings that supervised fine-tuning and recipes share."""

    lr: Positive = 1e-3  # of AdamW, after the warm-up
    weight_decay: NonNegative = 0.0  # decoupled
    beta1: FractionBelowOne = 0.9  # AdamW momentum
    beta2: FractionBelowOne = 0.99  # AdamW second-moment decay
    lr_final: NonNegative | None = None  # at the last update, reached linearly; None keeps the rate
    warmup: NonNegativeInt = 10  # updates of linear warm-up
    grad_clip: Positive = 1.0  # largest gradient norm


@dataclass(frozen=True)
class TextSFTConfig(TextLearnerConfig):
    """Settings of supervised fine-tuning."""

    batch_size: PositiveInt = 64  # conversations per update
    num_prompts: NonNegativeInt = 0  # number of different conversations; 0: always new ones
    data: str = ""  # JSONL or parquet file of demonstrations; empty takes the task's own solutions


class TextLearner(Algorithm):
    """Base of both: one AdamW on what is trainable of a text policy."""

    default_data: ClassVar[str]  # data source without algorithm.data, for messages
    policy: TextPolicy
    config: Any

    def __init__(self, config: TextLearnerConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place."""
        if not isinstance(policy, TextPolicy):
            raise UserError(f"Algorithm '{self.name}' trains text; choose policy=text, not '{policy.name}'.")
        super().__init__(policy, total_updates=total_updates)
        self.config = config
        self.optimizer = torch.optim.AdamW(
            policy.trainable(),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,  # a few percent of an update
        )

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Refuse datasets of robots."""
        if dataset:
            raise UserError(
                f"Algorithm '{cls.name}' reads no robot dataset; leave out dataset=. It learns from {cls.default_data} "
                "from algorithm.data=FILE (JSONL or parquet)."
            )

    def learning_rate(self) -> float:
        """Learning rate of the running update."""
        config = self.config
        final = config.lr if config.lr_final is None else config.lr_final
        return warmup_linear(config.lr, final, self.updates, self.total_updates, config.warmup)

    def sft_step(self, batch: Sequence[Sequence[str]]) -> Metrics:
        """One supervised step on conversations: user and assistant messages alternate."""
        self.policy.train()
        nll, entropy = self.policy.conversation_loss(batch, self.generator)
        metrics = self.optimizer_step(nll)
        self.updates += 1
        return metrics | {"actor/entropy": float(entropy.detach())}

    def optimizer_step(self, loss: torch.Tensor) -> Metrics:
        """One gradient step."""
        self.optimizer.param_groups[0]["lr"] = rate = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = nn.utils.clip_grad_norm_(trained, self.config.grad_clip)
        self.optimizer.step()
        return {"actor/loss": loss.item(), "actor/grad_norm": float(norm), "actor/lr": rate}

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Network and optimiser."""
        return {"policy": self.policy, "optimizer": self.optimizer}


class TextSFT(TextLearner):
    """Supervised fine-tuning on solved conversations."""

    name = "text_sft"
    config_class = TextSFTConfig
    data_source = "text_demonstrations"
    heads = ("text",)
    reference = "radford2018gpt"
    default_data = "the task's own solutions, or"
    config: TextSFTConfig

    def update(self, batch: Sequence[Sequence[str]]) -> Metrics:
        """One step."""
        return self.sft_step(batch)


def warmup_linear(start: float, final: float, done: int, total: int, warmup: int) -> float:
    """Learning rate after `done` of `total` updates: linear from `start` to `final`, below it while warming up."""
    rate = start + (final - start) * min(1.0, done / total)
    return rate * min(1.0, (done + 1) / (warmup + 1))
