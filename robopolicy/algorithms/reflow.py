"""Reflow: straightening of a flow policy, so that few Euler steps suffice (2-RF; Liu et al. 2022).

Demonstrations pair every chunk with random noise, so the paths of a flow cross and its trajectories bend. Reflow trains
the flow on pairs of noise and the end of its own ODE. These paths do not cross, so the new flow reaches the same chunks
on nearly straight trajectories. Only the observations of the dataset are used.

Use it on a good flow policy that must run in one to four steps. Repeating it straightens further, but accumulates
errors. Shortcut and MeanFlow policies need no straightening.

Deviation: pairs are computed for every minibatch, not once for a fixed dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.algorithms.common.algorithm import Checkpointable, frozen_copy
from robopolicy.constraints import NonNegativeInt, Positive, PositiveInt
from robopolicy.data.chunks import ChunkBatch
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import ode_solve


@dataclass(frozen=True)
class ReflowConfig(BCConfig):
    """Settings of reflow."""

    lr: Positive = 5e-4  # peak learning rate, lower than in pretraining
    teacher_steps: PositiveInt = 10  # steps of Heun from noise to chunk
    seed: NonNegativeInt = 0  # of noise and times


def reflow_loss(
    policy: GenerativePolicy,
    teacher: GenerativePolicy,
    batch: ChunkBatch,
    steps: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Info]:
    """Flow matching on the teacher's own pairs of noise and chunk."""
    features = policy.encode_for_training(batch.obs)
    noise = teacher.draw_noise(len(features), generator, features.device)
    data = ode_solve(teacher, batch.obs, noise, steps)
    times = policy.sample_times(len(features), generator).to(features.device)
    loss = policy.matching_loss(features, data, noise, times).mean(1)
    info = {"denoising": loss.detach().mean()}
    return (loss if batch.weight is None else loss * batch.weight).mean(), info


class Reflow(BC):
    """Training of a flow on its own trajectories."""

    name: ClassVar[str] = "reflow"
    config_class = ReflowConfig
    data_source = "dataset"
    heads = ("flow",)
    reference = "liu2022rectified"
    distributed = True
    requires_pretrained = True
    config: ReflowConfig
    policy: GenerativePolicy

    def __init__(self, config: ReflowConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to straighten `policy` in place in `total_updates` gradient steps."""
        if not isinstance(policy, GenerativePolicy) or policy.family != "flow" or policy.times != 1:
            raise UserError(f"Reflow needs init_from=CHECKPOINT of a 'flow', got '{policy.name}'; or use distill.")
        super().__init__(config, policy, total_updates=total_updates)
        self.generator.manual_seed(config.seed)
        self.teacher = frozen_copy(policy)

    def loss(self, batch: ChunkBatch) -> tuple[Tensor, Info]:
        """Flow matching loss on pairs of the initial flow, and metrics."""
        return reflow_loss(self.policy, self.teacher, batch, self.config.teacher_steps, self.generator)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Network, its average, the optimiser and the initial flow."""
        return {**super().checkpoint_items(), "teacher": self.teacher}
