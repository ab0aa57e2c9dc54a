"""Generative head that explores by its own sampler and is scored by its training loss (FPO, AWM, AC-Flow).

The training loss of the head at a chunk bounds how unlikely the chunk is, so minus the loss at fixed pairs of noise and
time replaces its log-probability, for any sampler. `complete` samples the pairs once per rollout and records them, so
that the ratio of fresh data is exactly 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import DecisionOutput, Observation, Policy, Record, Sample
from robopolicy.policies.exploration.chain import HeadWrapper, require_family
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import PerRowGenerator, Randomness, normal
from robopolicy.policies.path import interpolate

SUPPORTED = ("flow", "diffusion", "edm")  # families whose sampler follows the velocity that their loss fits


class SampledPolicy(HeadWrapper):
    """A head with optional Gaussian noise on its chunks; N decisions per chunk, one per pair of noise and time.

    `sample` records the normalised chunk `(B, H, A)`; `complete` adds the pairs that `decisions` needs. Only the
    executed steps of a chunk are scored.
    """

    name = "sampled"
    scored_by_sample = False

    def __init__(
        self, head: GenerativePolicy, *, num_mc_samples: int, exploration_std: float = 0.0, stratified: bool = False
    ) -> None:
        """Wrap `head`, which is shared, with `num_mc_samples` (N) pairs of noise and time per chunk.

        `exploration_std` is the standard deviation of noise added to sampled chunks, in normalised action units;
        `stratified` spreads the times of one chunk evenly over the time distribution of the head.
        """
        super().__init__(head)
        self.num_mc_samples = num_mc_samples
        self.exploration_std = exploration_std
        self.stratified = stratified

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample a chunk by the sampler of the head; its log-probability `(B, 1)` is 0 until `complete`."""
        normalizer = self.head.action_normalizer
        chunk = self.head.act(obs, generator=generator)
        data = normalizer.normalize(chunk)
        if self.exploration_std:
            data = self.head.clip(data + self.exploration_std * normal(data.shape, generator, data.device))
            chunk = normalizer.denormalize(data)
        return Sample(chunk, {"data": data}, data.new_zeros(len(data), 1))

    @torch.no_grad()
    def complete(self, obs: Observation, record: Record, generator: torch.Generator) -> Record:
        """Add N pairs to the record: noise `(B, N, H, A)` and time `(B, N)` on the linear path."""
        data = record["data"]
        rows = len(data) * self.num_mc_samples
        noise = normal((len(data), self.num_mc_samples, *data.shape[1:]), generator, data.device)
        source = _Strata(self.num_mc_samples, generator) if self.stratified else generator
        t = self.head.sample_times(rows, source).to(data.device)
        return record | {"noise": noise, "t": t.view(len(data), self.num_mc_samples)}

    def losses(self, obs: Observation, record: Record) -> Tensor:
        """Training loss `(B, N, Ta)` of each pair and executed step."""
        features, data, noise, t = self._points(self.head, obs, record)
        loss = self.head.matching_loss(features, data, noise, t)
        return loss.unflatten(0, record["t"].shape)[..., : self.spec.action_horizon]

    def velocities(self, head: GenerativePolicy, obs: Observation, record: Record) -> Tensor:
        """Velocity `(B, N, Ta, A)` of `head`, which may be a reference, at the recorded points of the path."""
        features, data, noise, t = self._points(head, obs, record)
        velocity = head.velocity(features, interpolate(noise, data, t[:, None, None]), t)
        return velocity.unflatten(0, record["t"].shape)[:, :, : self.spec.action_horizon]

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Minus the training loss `(B, N)` [nats], averaged over the executed steps; the entropy is 0."""
        logp = -self.losses(obs, record).mean(-1)
        return DecisionOutput(logp, torch.zeros_like(logp))

    def _points(self, head: GenerativePolicy, obs: Observation, record: Record) -> tuple[Tensor, ...]:
        """Features, data, noise and time, one row per pair; observations are encoded once."""
        noise, count = record["noise"], record["t"].shape[1]
        features = head.encode(obs).repeat_interleave(count, 0)
        data = record["data"].repeat_interleave(count, 0)
        return features, data, noise.flatten(0, 1), record["t"].flatten()


class _Strata(PerRowGenerator):
    """Stratified normal numbers in groups of N: one per N-th of the unit interval of probabilities."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        super().__init__([], [])
        self._count, self._generator = count, generator

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Sample `(B * N, 1)` numbers, sorted by stratum within each group."""
        device = self._generator.device
        draw = torch.rand(shape[0] // self._count, self._count, generator=self._generator, device=device)
        uniform = (torch.arange(self._count, device=device) + draw) / self._count
        return torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6)).view(tuple(shape))


def require_supported(policy: Policy, algorithm: str) -> GenerativePolicy:
    """Return `policy` as a head whose sampler follows the velocity of its training loss, or raise a `UserError`."""
    instead = "use ppo for a Gaussian, and fine-tune the teacher of a consistency policy"
    head = require_family(policy, SUPPORTED, algorithm, instead)
    if head.times > 1:
        raise UserError(
            f"{algorithm} trains the velocity at a point, but '{policy.name}' samples with learned steps of length "
            "1/K, which that training would not update; use reinflow."
        )
    return head
