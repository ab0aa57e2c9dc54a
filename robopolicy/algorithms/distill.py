"""Consistency distillation of a generative policy into a one-step policy (Song et al. 2023).

Demonstrations are noised to a level of the Karras grid, and one step of the frozen teacher's ODE gives the point of the
same trajectory one level below. The student maps the first point to the chunk to which a target network, a fast average
of the student, maps the second. Slowly averaged weights are evaluated and saved. The teacher is a flow, diffusion or
EDM policy, used through `field`. The student is a `ConsistencyPolicy` of the teacher's architecture, initialised with
its encoder and normalisers.

Use it to deploy a good teacher at a fraction of its latency; the student is slightly worse. Without a teacher, train a
MeanFlow, shortcut or consistency policy by behaviour cloning.

Deviations: distances are squared errors divided by the grid interval, without a perceptual metric; teacher steps are
Heun's on the linear path, equal to steps in sigma to first order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy
from robopolicy.constraints import AtLeastTwo, FractionBelowOne, NonNegativeInt, Positive, PositiveInt
from robopolicy.data.chunks import ChunkBatch
from robopolicy.errors import UserError
from robopolicy.nets.module_state import EMA
from robopolicy.policies.base import Info, Policy, chunk_mean
from robopolicy.policies.heads.consistency import ConsistencyConfig, ConsistencyPolicy
from robopolicy.policies.heads.generative import GenerativeConfig, GenerativePolicy
from robopolicy.policies.noise import normal
from robopolicy.policies.path import karras_sigmas, ode_step

TEACHERS = ("flow", "diffusion", "edm")


@dataclass(frozen=True)
class DistillConfig(BCConfig):
    """Settings of consistency distillation."""

    levels: AtLeastTwo = 18  # N, noise levels of the grid
    steps: PositiveInt = 1  # K, network calls of the student per chunk
    sigma_min: Positive = 0.002  # lowest noise level, where the student is the identity
    sigma_max: Positive = 80.0  # highest noise level
    sigma_data: Positive = 0.5  # standard deviation of normalised actions
    target_decay: FractionBelowOne = 0.95  # of the target network; 0 makes the student its own target
    seed: NonNegativeInt = 0  # of noise and levels


def distillation_loss(
    student: ConsistencyPolicy,
    target: ConsistencyPolicy,
    teacher: Policy,
    batch: ChunkBatch,
    levels: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Info]:
    """Squared distance of student and `target` at adjacent levels, divided by the interval between the levels."""
    config, data = student.config, student.action_normalizer.normalize(batch.chunk)
    sigmas = _sigmas(levels, config.sigma_min, config.sigma_max, config.rho, data.device)
    index = torch.randint(levels - 1, (len(data),), generator=generator, device=data.device)
    high, low = sigmas[index][:, None, None], sigmas[index + 1][:, None, None]
    x = data + high * normal(data.shape, generator, data.device)
    with torch.no_grad():
        start, end = 1 / (1 + high), 1 / (1 + low)  # times on the linear path
        below = ode_step(teacher, batch.obs, start * x, start.flatten(), end.flatten()) / end
        desired = target.denoise(target.encode(batch.obs), below, low)
    predicted = student.denoise(student.encode_for_training(batch.obs), x, high)
    loss = chunk_mean(((predicted - desired).square() / (high - low)).mean(-1), batch.mask)
    info = {"distillation": loss.detach().mean()}
    return (loss if batch.weight is None else loss * batch.weight).mean(), info


@lru_cache
def _sigmas(levels: int, low: float, high: float, rho: float, device: torch.device) -> Tensor:
    """Noise levels `(levels,)` on a device, which is waited for once."""
    return karras_sigmas(levels, low, high, rho)[:-1].float().to(device)


def make_student(teacher: GenerativePolicy, config: DistillConfig) -> ConsistencyPolicy:
    """Build a consistency policy of the teacher's architecture with its encoder and normalisers."""
    shared = {entry.name: getattr(teacher.config, entry.name) for entry in fields(GenerativeConfig)}
    sampler = {name: getattr(config, name) for name in ("steps", "sigma_min", "sigma_max", "sigma_data")}
    student = ConsistencyPolicy(ConsistencyConfig(**(shared | sampler)), teacher.spec)
    student.encoder.load_state_dict(teacher.encoder.state_dict())
    student.action_normalizer.load_state_dict(teacher.action_normalizer.state_dict())
    return student.to(next(teacher.parameters()).device)


class Distill(BC):
    """Distillation of a policy into a student, which is trained and deployed."""

    name: ClassVar[str] = "distill"
    config_class = DistillConfig
    data_source = "dataset"
    heads = ("flow", "shortcut", "meanflow", "diffusion", "edm")
    reference = "song2023consistency"
    distributed = True
    requires_pretrained = True
    config: DistillConfig
    policy: ConsistencyPolicy

    def __init__(self, config: DistillConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to distil `policy`, which stays unchanged, in `total_updates` gradient steps."""
        if not isinstance(policy, GenerativePolicy) or policy.family not in TEACHERS:
            raise UserError(
                f"Distillation needs a {', '.join(TEACHERS[:-1])} or {TEACHERS[-1]} policy as teacher, got "
                f"'{policy.name}'; pass init_from=CHECKPOINT of one."
            )
        super().__init__(config, make_student(policy, config), total_updates=total_updates)
        self.generator.manual_seed(config.seed)
        self.teacher = frozen_copy(policy)
        self.target = EMA(self.policy, config.target_decay)

    def loss(self, batch: ChunkBatch) -> tuple[Tensor, Info]:
        """Consistency loss along the teacher's trajectories, and metrics."""
        target = self.target.module
        return distillation_loss(self.policy, target, self.teacher, batch, self.config.levels, self.generator)

    def update(self, batch: ChunkBatch) -> Metrics:
        """Take a gradient step and update the target network."""
        metrics = super().update(batch)
        self.target.update(self.policy)
        return metrics

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Student, its average, its target, the optimiser and the teacher."""
        return {**super().checkpoint_items(), "target": self.target, "teacher": self.teacher}
