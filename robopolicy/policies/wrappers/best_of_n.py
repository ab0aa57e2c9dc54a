"""A policy that executes the best of N chunks of another one by the values of a Q ensemble.

Best-of-N needs nothing of the base policy but samples, so it improves any head without touching its weights, and falls
back to plain imitation for N = 1. IDQL and Q-chunking act this way. Subclasses propose more than raw samples:
`optimized` climbs the critic (PA-RL), `edited` adds learned edits (EXPO).

N samples cost N times the base policy's network calls, and a critic that is wrong about a rare sample will pick it:
more candidates are not always better.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import Positive, PositiveInt, Validated
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.critics.value import softmax_weights
from robopolicy.errors import unknown_name
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Observation, Policy, PolicySpec, Sample
from robopolicy.policies.density import choose
from robopolicy.policies.noise import Randomness, uniform
from robopolicy.policies.wrappers.nested import WrappingPolicy, describe, rebuild

SELECTIONS = ("argmax", "softmax")
REDUCTIONS = ("mean", "min")


@dataclass(frozen=True)
class BestOfNConfig(Validated):
    """Settings of a `BestOfNPolicy`."""

    base: dict[str, Any] = field(default_factory=dict)  # description of the sampled policy, see `nested`
    critic: CriticConfig = field(default_factory=CriticConfig)  # Q ensemble
    candidates: PositiveInt = 32  # N, samples of the base policy per decision
    selection: str = "argmax"  # argmax | softmax (a draw; the best one all the same when acting deterministically)
    temperature: Positive = 1.0  # of the softmax, in units of Q
    reduction: str = "mean"  # mean | min over the ensemble

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selection not in SELECTIONS:
            raise unknown_name("selection", self.selection, SELECTIONS)
        if self.reduction not in REDUCTIONS:
            raise unknown_name("reduction", self.reduction, REDUCTIONS)


@dataclass(frozen=True)
class Candidates:
    """Candidate chunks and their values."""

    chunks: Tensor  # (B, C, H, A) env units
    values: Tensor  # (B, C)

    def take(self, index: Tensor) -> Tensor:
        """The chunks `(B, H, A)` at `index` `(B,)`."""
        return self.chunks[torch.arange(len(index), device=index.device), index]

    def best(self) -> Tensor:
        """The chunks `(B, H, A)` of highest value."""
        return self.take(self.values.argmax(1))


def draw_index(values: Tensor, temperature: float, generator: Randomness) -> Tensor:
    """Draw one of C candidates per row `(B,)` with probability proportional to exp(value / temperature)."""
    return choose(softmax_weights(values, temperature).log(), uniform((len(values), 1), generator, values.device)[:, 0])


def reduce_members(values: Tensor, reduction: str) -> Tensor:
    """Mean or minimum of an ensemble: `(M, ...)` -> `(...)`."""
    return values.mean(0) if reduction == "mean" else values.min(0).values


def within_bounds(normalizer: Normalizer, x: Tensor, start: Tensor) -> Tensor:
    """Keep normalised actions `x` in [-1, 1], or where `start` already was; other modes than minmax know no bounds."""
    if normalizer.mode != "minmax":
        return x
    limit = start.abs().clamp(min=1.0)
    return torch.minimum(torch.maximum(x, -limit), limit)


class BestOfNPolicy(WrappingPolicy):
    """Best-of-N (or softmax) over samples of `base`; verbs `act`, `sample` and the base's `imitation_loss`."""

    name: ClassVar[str] = "selected"
    config_class = BestOfNConfig
    config: BestOfNConfig

    def __init__(
        self,
        config: BestOfNConfig,
        spec: PolicySpec | None = None,
        *,
        base: Policy | None = None,
        critic: QEnsemble | None = None,
    ) -> None:
        """Build the policy.

        Args:
            config: Settings; its description of the base policy and of the critic are used where none is given.
            spec: That of the base policy; taken from it.
            base: Policy to sample, shared with the caller.
            critic: Its judge, shared with the caller.
        """
        super().__init__()
        self.base = rebuild(config.base) if base is None else base
        self.spec = self.base.spec
        self.critic = QEnsemble(config.critic, self.base) if critic is None else critic
        self.config = config

    @property
    def nfe(self) -> int:
        """Those of all samples, and one of the critic for each candidate; the samples run as one batch."""
        return self.config.candidates * (self.base.nfe + 1)

    def samples(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunks `(B, N, H, A)` of the base policy; a single one is drawn exactly as the base policy does."""
        count = self.config.candidates
        if count == 1:
            return self.base.act(obs, deterministic=deterministic, generator=generator)[:, None]
        return self.base.sample_many(obs, count, generator=generator)

    def score(self, obs: Observation, chunks: Tensor) -> Tensor:
        """Values `(B, C)` of `chunks` `(B, C, H, A)`: mean or minimum of the ensemble."""
        return reduce_members(self.critic.candidate_values(obs, chunks), self.config.reduction)

    @torch.no_grad()
    def propose(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Candidates:
        """Candidate chunks; subclasses improve them."""
        chunks = self.samples(obs, deterministic=deterministic, generator=generator)
        return Candidates(chunks, self.score(obs, chunks))

    def choose(self, values: Tensor, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Index `(B,)` of the candidate to action_horizon, given their values `(B, C)`."""
        if deterministic or self.config.selection == "argmax":
            return values.argmax(1)
        return draw_index(values, self.config.temperature, generator)

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The chosen chunk; `deterministic` takes the best one, among samples that are still drawn."""
        found = self.propose(obs, deterministic=deterministic, generator=generator)
        return found.take(self.choose(found.values, deterministic=deterministic, generator=generator))

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The chosen chunk; it has no density."""
        return Sample.unscored(self.act(obs, generator=generator))


def make_best_of_n(base: Policy, critic: QEnsemble, **settings: Any) -> BestOfNPolicy:
    """Best-of-N of `base` by `critic`, both shared; `settings` are those of `BestOfNConfig`."""
    config = BestOfNConfig(base=describe(base), critic=critic.config, **settings)
    return BestOfNPolicy(config, base=base, critic=critic)
