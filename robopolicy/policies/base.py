"""The policy interface: one object for imitation, fine-tuning, composition, evaluation and deployment.

Shapes: B batch, To observation history, H chunk length, A action dimensions, T decisions per chunk.
Observations are `{key: (B, To, ...)}` and chunks `(B, H, A)`, both in the units of the simulator or robot; every
normaliser lives inside the policy. `chunk[:, 0]` is the action for the newest observation; the first `action_horizon`
actions are executed before the next call.

A *decision* is the smallest thing chosen with a log-probability: a Gaussian action (T = 1) or one denoising transition
(T = number of network calls). `sample` and `decisions` of one policy call the same function for mean and standard
deviation, so the ratio of fresh data is exactly 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.device import module_device
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.normalizer import Statistics
from robopolicy.policies.noise import Randomness, repeated
from robopolicy.spec import PolicySpec

Observation = dict[str, Tensor]
Record = dict[str, Tensor]
Info = dict[str, Tensor]


@dataclass(frozen=True)
class Sample:
    """A chunk drawn for exploration, with what `decisions` needs to score it again."""

    chunk: Tensor  # (B, H, A) what the simulator executes
    record: Record  # {name: (B, ...)} input of `Policy.decisions`
    logp: Tensor  # (B, T) log-probabilities at sampling time
    memory: Tensor | None = None  # (B, 1, M) what a recurrent policy wants to observe at its next decision

    @classmethod
    def unscored(cls, chunk: Tensor) -> Sample:
        """A chunk without decisions, for learning from replay."""
        return cls(chunk, {}, chunk.new_zeros(len(chunk), 0))


@dataclass(frozen=True)
class DecisionOutput:
    """Log-probabilities and entropies of recorded decisions under the current parameters."""

    logp: Tensor  # (B, T) nats
    entropy: Tensor  # (B, T) nats


def chunk_mean(value: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the steps of a chunk, `(B, H)` -> `(B,)`, without padded ones; a row of padding alone gives 0."""
    if mask is None:
        return value.mean(1)
    mask = mask.to(value.dtype)
    return (value * mask).sum(1) / mask.sum(1).clamp(min=1)


class Policy(nn.Module, ABC):
    """Base class of every policy. Subclasses implement the verbs that make sense for them."""

    name: ClassVar[str]  # key in `POLICIES`
    config_class: ClassVar[type[Any]]  # frozen dataclass of its settings
    fallback_hint: ClassVar[str] = ""  # of a policy made of others: what to do where only one of them will do
    spec: PolicySpec

    @property
    def device(self) -> torch.device:
        """Device of its parameters or buffers; the CPU if it has neither."""
        return module_device(self) or torch.device("cpu")

    @abstractmethod
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return the chunk `(B, H, A)` to deploy.

        `deterministic` removes exploration noise. A generative head still draws its initial noise from `generator`:
        with a fixed seed, or one stream per row (`PerRowGenerator`), the chunk is a function of the observation alone.
        """

    @torch.no_grad()
    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """`count` chunks `(B, count, H, A)` for each observation, to choose from; as `act` draws them.

        Heads encode each observation once, which with cameras is most of the work.
        """
        rows = {key: value.repeat_interleave(count, 0) for key, value in obs.items()}
        chunks = self.act(rows, generator=repeated(generator, count))
        return chunks.view(-1, count, *chunks.shape[1:])

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Per-sample supervised loss `(B,)` towards `chunk` `(B, H, A)`, times `weight` `(B,)`.

        `mask` `(B, H)` is 0 on padded steps of the chunk, which then carry no loss.
        """
        raise self._lacks("imitation_loss")

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk with exploration and record its decisions."""
        raise self._lacks("sample")

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Score recorded decisions under the current parameters; differentiable."""
        raise self._lacks("decisions")

    def next_hidden(self, obs: Observation) -> Tensor:
        """Memory `(B, 1, M)` of a recurrent policy after `obs`, whose key `memory` holds the last one; differentiable.

        Recurrent policies stay functions of their inputs: the caller keeps the memory, passes it
        with the next observation and hands over zeros when an episode begins.
        """
        raise self._lacks("next_hidden")

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Map `noise` `(B, *noise_shape)` to the chunk `(B, H, A)` deterministically (generative heads)."""
        raise self._lacks("decode")

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity = data - noise at `x`, both `(B, *noise_shape)`, all in normalised units.

        Time `t` `(B,)` runs from 0 (noise) to 1 (data).
        """
        raise self._lacks("field")

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit every normaliser from `{key: {"min", "max", "mean", "std"}}` of observations and "action"."""
        raise self._lacks("fit_normalizer")

    def update_stats(self, obs: Observation) -> None:
        """Merge `obs` into running observation statistics, if there are any.

        Call it between iterations only: sampling and scoring must see the same transform.
        """
        for part in self.modules():
            if isinstance(part, ObservationEncoder):
                part.update_stats(obs)

    def set_progress(self, progress: float) -> None:
        """Set all schedules of the policy to `progress` in [0, 1] of training.

        Call it between updates only, as `observe`. Most policies have none.
        """

    def notes(self) -> list[str]:
        """Sentences for the reader of a report about the decisions since the last call, such as what failed."""
        return []

    @property
    def is_steerable(self) -> bool:
        """Whether `decode` turns noise into chunks, so that the policy can be steered through it."""
        return type(self).decode is not Policy.decode

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape of the noise of `decode` and of the points of `field`, without the batch: the shape of a chunk.

        Networks from elsewhere may be wider. Then the first H rows and A columns belong to the chunk, and what lies
        beyond them is known to the policy alone.
        """
        return self.spec.horizon, self.spec.action_dim

    @property
    def nfe(self) -> int:
        """Network evaluations per chunk in `act`."""
        return 1

    def config_dict(self) -> dict[str, Any]:
        """Constructor configuration as plain JSON values; `spec` is stored separately."""
        return asdict(self.config)  # type: ignore[attr-defined]

    def _lacks(self, verb: str) -> TypeError:
        return TypeError(f"Policy '{self.name}' has no {verb}; docs/methods/README.md lists the verbs.")
