"""Flow Q-learning (FQL, Park et al. 2025) and, with chunks, QC-FQL (Li et al. 2025): a flow and a one-step policy.

The flow imitates the replay buffer. A second network maps the same noise to an action in one call. It is distilled from
the flow and trained to raise Q, so no gradient passes through the sampler's steps. The one-step policy acts, bootstraps
and is deployed.

Use it when a decision may take only milliseconds and demonstrations exist. One call cannot represent separate modes.
Tune `alpha`: if it is too small, the policy leaves the data; if it is too large, it only imitates.

Deviations from the public code: the base may be any denoising head with `decode`; the distance is in normalised units;
the one-step policy starts as a copy of the base if their networks are equal; critic, flow and one-step policy have
separate optimisers; gradients of both policies are clipped to norm 1; critics normalise before activations (there:
after, `critic.norm_after_activation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import OffPolicy, UpdateStats, optimizer_step
from robopolicy.algorithms.common.offline import QChunkingConfig, complete_chunk_loss, imitation_step
from robopolicy.constraints import NonNegative
from robopolicy.critics.q import QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Observation, Policy, Sample
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.generative import GenerativeConfig, GenerativePolicy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.zero_noise import without_zero_noise


@dataclass(frozen=True)
class FQLConfig(QChunkingConfig):
    """Settings of FQL."""

    alpha: NonNegative = 10.0  # weight of distillation relative to Q; .03 to 10 (10 to 30000 for unnormalised Q)
    normalize_q: bool = True  # divide the values by their mean magnitude in the actor's loss (paper: false)


def one_step_copy(head: GenerativePolicy) -> FlowPolicy:
    """Build a one-step flow of the same architecture and normalisers, with the weights of `head` if it is a flow."""
    shared: dict[str, Any] = {entry.name: getattr(head.config, entry.name) for entry in fields(GenerativeConfig)}
    shared["steps"] = 1
    config = FlowConfig(**shared)
    same = type(head) is FlowPolicy  # subclasses have other networks
    if same:
        config = replace(head.config, steps=1)
    student = FlowPolicy(config, head.spec).to(next(head.parameters()).device)
    if same:
        student.load_state_dict(head.state_dict())
    else:
        student.encoder.load_state_dict(head.encoder.state_dict())
        student.action_normalizer.load_state_dict(head.action_normalizer.state_dict())
    return student


def actor_loss(
    student: FlowPolicy,
    teacher: GenerativePolicy,
    critic: QEnsemble,
    obs: Observation,
    config: FQLConfig,
    generator: Randomness = None,
) -> tuple[Tensor, Info]:
    """`alpha * |student(z) - teacher(z)|^2 - Q(clip(student(z)))`, with the mean distance of unclipped chunks."""
    rows = next(iter(obs.values()))
    noise = student.draw_noise(len(rows), generator, rows.device)
    with torch.no_grad():
        target = student.action_normalizer.normalize(teacher.decode(obs, noise))
    unclipped = student.step(student.encode(obs), noise, noise.new_zeros(len(noise), dtype=torch.int64))  # (B, H, A)
    distance = (unclipped - target).square().mean()
    value = critic(obs, student.action_normalizer.denormalize(student.clip(unclipped))).mean(0)
    scale = 1 / value.detach().abs().mean().clamp(min=1e-6) if config.normalize_q else 1.0
    return config.alpha * distance - scale * value.mean(), {"distance": distance, "value": value.mean()}


class FQL(OffPolicy):
    """Q-learning with a flow trained by imitation and a distilled one-step policy."""

    name = "fql"
    config_class = FQLConfig
    data_source = "replay"
    heads = ("decode",)
    reference = "park2025fql"
    uses_full_ensemble = True
    supports_rho = True
    config: FQLConfig
    policy: GenerativePolicy

    def __init__(self, config: FQLConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to clone `policy` and to distil it into one step."""
        policy = without_zero_noise(policy)
        if not isinstance(policy, GenerativePolicy):
            raise UserError(f"FQL needs a denoising policy, got '{policy.name}'; use sac or rlpd for a Gaussian.")
        if type(policy) is FlowPolicy and policy.config.steps == 1:
            raise UserError(
                "FQL needs a flow of several steps, because the single step of a cloned flow is the mean of the data. "
                "Start from the original flow, or raise policy.steps."
            )
        super().__init__(config, policy.eval(), total_updates=total_updates)
        self.critic.eval()  # dropout is active only in its own loss
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr, fused=True)
        self.student = one_step_copy(policy).eval()  # no dropout, because the flow is its teacher
        self.student_optimizer = torch.optim.Adam(self.student.parameters(), lr=config.lr, fused=True)

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the one-step policy."""
        return Sample.unscored(self.student.act(obs, generator=generator))

    def warmup_action(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk of the flow, without the untrained critic."""
        return Sample.unscored(self.policy.act(obs, generator=generator))

    def target(self, batch: Transitions) -> Tensor:
        """`reward + discount * Q'` at a chunk of the one-step policy: the mean of all members, or by `rho`."""
        chunk = self.student.act(batch.next_obs, generator=self.generator)
        return self.bootstrap(batch, chunk)

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, Info]:
        """Temporal-difference loss of complete chunks."""
        return complete_chunk_loss(self.critic, batch, self.target, self.sample_spec.steps)

    def update(self, batch: Transitions) -> Metrics:
        """Take critic steps on consecutive minibatches, with delayed steps of flow and one-step policy."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part))
            if self.policy_due():
                imitation = imitation_step(self, part.obs, part.chunk, mask=part.mask)
                self.critic.requires_grad_(False)
                loss, info = actor_loss(self.student, self.policy, self.critic, part.obs, self.config, self.generator)
                optimizer_step(self.student_optimizer, loss, self.student, self.config.grad_clip)
                self.critic.requires_grad_(True)
                stats.actor(imitation=imitation, loss=loss, **info)
        return self.finish(batch, stats)

    def observers(self) -> tuple[Observer, ...]:
        """Networks of the base class and one-step policy."""
        return *super().observers(), self.student

    def inference_policy(self) -> Policy:
        """The one-step policy."""
        return self.student

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of the base class, flow optimiser, one-step policy and its optimiser."""
        own = {"optimizer": self.optimizer, "student": self.student, "student_optimizer": self.student_optimizer}
        return {**super().checkpoint_items(), **own}
