"""Policy that executes the best of N chunks of another policy by the values of a Q ensemble.

Best-of-N needs only samples of the base policy, so it improves any head without changing its weights; N = 1 is plain
imitation. IDQL and Q-chunking act this way. Subclasses propose more than raw samples: `optimized` ascends the critic
(PA-RL), `edited` adds learned edits (EXPO).

N samples cost N times the network calls of the base policy, and a critic that overestimates a rare sample selects it:
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
from robopolicy.policies.density import sample_category
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
    selection: str = "argmax"  # argmax | softmax (sampled; argmax if deterministic)
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
        """Return the chunks `(B, H, A)` at `index` `(B,)`."""
        return self.chunks[torch.arange(len(index), device=index.device), index]

    def best(self) -> Tensor:
        """Return the chunks `(B, H, A)` of highest value."""
        return self.take(self.values.argmax(1))


def draw_index(values: Tensor, temperature: float, generator: Randomness) -> Tensor:
    """Sample one of C candidates per row `(B,)` with probability proportional to exp(value / temperature)."""
    noise = uniform((len(values), 1), generator, values.device)[:, 0]
    return sample_category(softmax_weights(values, temperature).log(), noise)


def reduce_members(values: Tensor, reduction: str) -> Tensor:
    """Mean or minimum of an ensemble: `(M, ...)` -> `(...)`."""
    return values.mean(0) if reduction == "mean" else values.min(0).values


def clip_to_bounds(normalizer: Normalizer, x: Tensor, start: Tensor) -> Tensor:
    """Keep normalised actions `x` in [-1, 1], or within `start`; only the mode minmax has bounds."""
    if normalizer.mode != "minmax":
        return x
    limit = start.abs().clamp(min=1.0)
    return torch.minimum(torch.maximum(x, -limit), limit)


class BestOfNPolicy(WrappingPolicy):
    """Best-of-N (or softmax) over samples of `base`; methods `act`, `sample` and the base's `imitation_loss`."""

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
        """Build the policy from shared `base` and `critic`, or else from their descriptions in `config`.

        `spec` is ignored; the specification of the base policy is used.
        """
        super().__init__()
        self.base = rebuild(config.base) if base is None else base
        self.spec = self.base.spec
        self.critic = QEnsemble(config.critic, self.base) if critic is None else critic
        self.critic.require_policy_obs()
        self.config = config

    @property
    def nfe(self) -> int:
        """Evaluations of all samples, which run as one batch, and one of the critic per candidate."""
        return self.config.candidates * (self.base.nfe + 1)

    def samples(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunks `(B, N, H, A)` of the base policy; a single chunk equals `act` of the base policy."""
        count = self.config.candidates
        if count == 1:
            return self.base.act(obs, deterministic=deterministic, generator=generator)[:, None]
        return self.base.sample_many(obs, count, generator=generator)

    def score(self, obs: Observation, chunks: Tensor) -> Tensor:
        """Values `(B, C)` of `chunks` `(B, C, H, A)`: mean or minimum of the ensemble."""
        return reduce_members(self.critic.candidate_values(obs, chunks), self.config.reduction)

    @torch.no_grad()
    def propose(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Candidates:
        """Sample candidate chunks; subclasses improve them."""
        chunks = self.samples(obs, deterministic=deterministic, generator=generator)
        return Candidates(chunks, self.score(obs, chunks))

    def choose(self, values: Tensor, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Index `(B,)` of the candidate to execute, given their values `(B, C)`."""
        if deterministic or self.config.selection == "argmax":
            return values.argmax(1)
        return draw_index(values, self.config.temperature, generator)

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return the selected chunk; `deterministic` selects the best of the random samples."""
        found = self.propose(obs, deterministic=deterministic, generator=generator)
        return found.take(self.choose(found.values, deterministic=deterministic, generator=generator))

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Return the selected chunk, without a density."""
        return Sample.unscored(self.act(obs, generator=generator))


def make_best_of_n(base: Policy, critic: QEnsemble, **settings: Any) -> BestOfNPolicy:
    """Best-of-N of `base` by `critic`, both shared; `settings` are fields of `BestOfNConfig`."""
    config = BestOfNConfig(base=describe(base), critic=critic.config, **settings)
    return BestOfNPolicy(config, base=base, critic=critic)
