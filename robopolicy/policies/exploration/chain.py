"""Denoising chains with a density: sampler steps with Gaussian noise, so that policy gradients can score them.

A chain wraps a generative head. Its `transition` is used by sampling and scoring, and both index the same steps, so the
ratio of fresh data is exactly 1. The noise is for training only: the plain head is deployed.
"""

from __future__ import annotations

import copy
from abc import abstractmethod

import torch
from torch import Tensor

from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.normalizer import Statistics
from robopolicy.policies.base import DecisionOutput, Info, Observation, Policy, Record, Sample
from robopolicy.policies.density import normal_entropy, normal_log_density
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.noise import PerRowGenerator, Randomness, draw_seeds, normal
from robopolicy.policies.path import step_index
from robopolicy.policies.wrappers.zero_noise import without_zero_noise


class HeadWrapper(Policy):
    """Base of wrappers around a generative head; subclasses add `sample` and `decisions`."""

    def __init__(self, head: GenerativePolicy) -> None:
        """Wrap `head`, which is shared, not copied; its parameters keep the prefix `head.`."""
        super().__init__()
        self.spec = head.spec
        self.head = head

    @property
    def nfe(self) -> int:
        """Network calls of the head; exploration is not deployed."""
        return self.head.nfe

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk of the plain head if `deterministic`, else an exploring sample."""
        if deterministic:
            return self.head.act(obs, deterministic=True, generator=generator)
        return self.sample(obs, generator=generator).chunk

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Loss of the wrapped head."""
        return self.head.imitation_loss(obs, chunk, weight, mask=mask, generator=generator)

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk of the wrapped head."""
        return self.head.decode(obs, noise)

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity of the wrapped head."""
        return self.head.field(obs, x, t)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers of the wrapped head."""
        self.head.fit_normalizer(statistics)

    def set_progress(self, progress: float) -> None:
        """Set the progress of the wrapped head."""
        self.head.set_progress(progress)


class StochasticSampler(HeadWrapper):
    """Base of the noisy chains: methods of the head, `sample` and `decisions`, with one decision per scored transition.

    The record holds the chain `(B, T + 1, H, A)` of normalised iterates, from the first scored iterate to the chunk.
    """

    noise_clip: float = 0.0  # noise is clipped at this many standard deviations; 0 disables
    chain_dtype: torch.dtype = torch.float32  # of recorded iterates; bfloat16 halves the memory and keeps ratios exact

    @abstractmethod
    def transition(self, features: Tensor, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations of the iterates after `x` and steps `k`; shapes as in `sampler_step`."""

    def step_logp(self, x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Log-probability `(B,)` of one transition to `x` `(B, H, A)`: the sum over all dimensions."""
        return normal_log_density(x, mean, log_std).flatten(1).sum(1)

    def step_entropy(self, log_std: Tensor) -> Tensor:
        """Entropy `(B,)` of one transition, reduced as `step_logp`."""
        return normal_entropy(log_std).flatten(1).sum(1)

    def run_frozen_steps(self, obs: Observation, noise: Tensor, generator: Randomness) -> Tensor:
        """First scored iterate for the initial `noise` `(B, H, A)`; chains with frozen steps run them here."""
        return self.head.init_sample(noise)

    @property
    def first_trained_step(self) -> int:
        """Index of the first scored sampler step."""
        return 0

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample a chunk and record its chain.

        The last iterate is scored before it is clipped to the action bounds. The density of the initial noise does not
        depend on any parameter and is omitted.
        """
        features = self.head.encode(obs)
        batch = len(features)
        x = self._stored(self.run_frozen_steps(obs, self.head.draw_noise(batch, generator, features.device), generator))
        chain, logp = [x], []
        for k in range(self.first_trained_step, self.head.config.steps):
            mean, log_std = self.transition(features, x.float(), step_index(k, x))
            noise = normal(mean.shape, generator, mean.device)
            if self.noise_clip:
                noise = noise.clamp(-self.noise_clip, self.noise_clip)
            x = self._stored(mean + log_std.exp() * noise)
            chain.append(x)
            logp.append(self.step_logp(x.float(), mean, log_std))
        chunk = self.head.action_normalizer.denormalize(self.head.clip(x.float()))
        return Sample(chunk, {"chain": torch.stack(chain, 1)}, torch.stack(logp, 1))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, T)` of each recorded transition, by one network call."""
        return self.score(record, *self.transitions(obs, record))

    def transitions(self, obs: Observation, record: Record) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation `(B, T, H, A)` of the recorded transitions."""
        before = record["chain"][:, :-1].float()
        k = torch.arange(self.first_trained_step, self.first_trained_step + before.shape[1], device=before.device)
        return self.transition(self.head.encode(obs), before, k)

    def score(self, record: Record, mean: Tensor, log_std: Tensor) -> DecisionOutput:
        """Log-probability and entropy `(B, T)` of recorded transitions with these moments `(B, T, H, A)`."""
        shape = mean.shape[:2]
        x, mean, log_std = (value.flatten(0, 1) for value in (record["chain"][:, 1:].float(), mean, log_std))
        return DecisionOutput(self.step_logp(x, mean, log_std).view(shape), self.step_entropy(log_std).view(shape))

    def _stored(self, x: Tensor) -> Tensor:
        return x.to(self.chain_dtype)


def require_family(policy: Policy, families: tuple[str, ...], algorithm: str, instead: str) -> GenerativePolicy:
    """Return `policy`, unwrapped if it uses zero noise, as a generative head of one of `families`.

    Raises:
        UserError: It is another policy; the message states the required kinds and the alternative `instead`.
    """
    policy = without_zero_noise(policy)
    if not isinstance(policy, GenerativePolicy) or policy.family not in families:
        kinds, hint = " or ".join(families), policy.fallback_hint or instead
        raise UserError(f"{algorithm} fine-tunes policies of the kind {kinds}, got '{policy.name}'; {hint}.")
    return policy


CHAIN_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def chain_dtype(name: str) -> torch.dtype:
    """Type of recorded iterates by name, float32 or bfloat16."""
    if name not in CHAIN_DTYPES:
        raise unknown_name("chain_dtype", name, CHAIN_DTYPES)
    return CHAIN_DTYPES[name]


class RecomputedChain:
    """Sampler of a chain policy with one seed per row, which samples the same chains again during the update."""

    def __init__(self, chain: StochasticSampler) -> None:
        """Wrap `chain`, which is shared; `snapshot` takes a copy."""
        self.chain = chain
        self._behaviour: StochasticSampler | None = None

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample as `StochasticSampler.sample`; the record is `seed` `(B,)` int64."""
        first = next(iter(obs.values()))
        seed = draw_seeds(len(first), generator, first.device)
        sample = self.chain.sample(obs, generator=_row_generator(seed))
        return Sample(sample.chunk, {"seed": seed}, sample.logp)

    def snapshot(self) -> None:
        """Copy the sampling weights; call it before the first gradient step of an update."""
        if self._behaviour is None:
            self._behaviour = copy.deepcopy(self.chain).requires_grad_(False)
        else:
            self._behaviour.load_state_dict(self.chain.state_dict())

    def resample(self, obs: Observation, record: Record) -> tuple[Record, Tensor]:
        """Record and log-probabilities `(B, T)` of the chains given by the seeds of `record`."""
        if self._behaviour is None:
            raise RuntimeError("Call snapshot before resample.")
        sample = self._behaviour.sample(obs, generator=_row_generator(record["seed"]))
        return sample.record, sample.logp


def _row_generator(seed: Tensor) -> PerRowGenerator:
    return PerRowGenerator(seed.tolist(), [0] * len(seed))
