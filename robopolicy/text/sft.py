"""Supervised fine-tuning on solved conversations, and the optimizer shared by all text algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, make_metrics
from robopolicy.constraints import FractionBelowOne, NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy
from robopolicy.text.policy import TextPolicy


@dataclass(frozen=True)
class TextLearnerConfig(Validated):
    """Settings shared by supervised fine-tuning and recipes."""

    lr: Positive = 1e-3  # of AdamW, after the warm-up
    weight_decay: NonNegative = 0.0  # decoupled
    beta1: FractionBelowOne = 0.9  # AdamW momentum
    beta2: FractionBelowOne = 0.99  # AdamW second-moment decay
    lr_final: NonNegative | None = None  # at the last update, linear decay; None: constant
    warmup: NonNegativeInt = 10  # updates of linear warm-up
    grad_clip: Positive = 1.0  # largest gradient norm


@dataclass(frozen=True)
class TextSFTConfig(TextLearnerConfig):
    """Settings of supervised fine-tuning."""

    batch_size: PositiveInt = 64  # conversations per update
    num_prompts: NonNegativeInt = 0  # number of different conversations; 0: unlimited
    data: str = ""  # JSONL or parquet file of demonstrations; empty: the task's own solutions


class TextLearner(Algorithm):
    """Base class of text algorithms: AdamW on the trainable parameters of a text policy."""

    default_data: ClassVar[str]  # data source without algorithm.data, for error messages
    policy: TextPolicy
    config: Any

    def __init__(self, config: TextLearnerConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place."""
        if not isinstance(policy, TextPolicy):
            raise UserError(f"Algorithm '{self.name}' trains text policies; use policy=text, not '{policy.name}'.")
        super().__init__(policy, total_updates=total_updates)
        self.config = config
        betas = config.beta1, config.beta2
        self.optimizer = torch.optim.AdamW(
            policy.trainable(), lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True
        )

    @classmethod
    def check_settings(cls, *, dataset: str, env_steps: int, offline_updates: int) -> None:
        """Reject robot datasets."""
        if dataset:
            raise UserError(
                f"Algorithm '{cls.name}' does not use robot datasets; remove dataset=. It learns from "
                f"{cls.default_data} from algorithm.data=FILE (JSONL or parquet)."
            )

    def learning_rate(self) -> float:
        """Return the learning rate of this update."""
        config = self.config
        final = config.lr if config.lr_final is None else config.lr_final
        return warmup_linear(config.lr, final, self.updates, self.total_updates, config.warmup)

    def sft_step(self, batch: Sequence[Sequence[str]]) -> Metrics:
        """Take one supervised step on conversations of alternating user and assistant messages."""
        self.policy.train()
        nll, entropy = self.policy.conversation_loss(batch, self.generator)
        metrics = self.optimizer_step(nll)
        self.updates += 1
        return metrics | make_metrics({"actor/entropy": entropy})

    def optimizer_step(self, loss: torch.Tensor) -> Metrics:
        """Take one gradient step."""
        self.optimizer.param_groups[0]["lr"] = rate = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = nn.utils.clip_grad_norm_(trained, self.config.grad_clip)
        self.optimizer.step()
        return make_metrics({"actor/loss": loss, "actor/grad_norm": norm, "actor/lr": rate})

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Return policy and optimizer."""
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
        """Take one supervised step."""
        return self.sft_step(batch)


def warmup_linear(start: float, final: float, done: int, total: int, warmup: int) -> float:
    """Compute the learning rate after `done` of `total` updates: linear from `start` to `final`, after a warm-up."""
    rate = start + (final - start) * min(1.0, done / total)
    return rate * min(1.0, (done + 1) / (warmup + 1))
