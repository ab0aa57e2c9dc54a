"""The policy interface: one object for imitation, fine-tuning, composition, evaluation and deployment.

Shapes: B batch, To observation history, H chunk length, A action dimensions, T decisions per chunk. Observations are
`{key: (B, To, ...)}` and chunks `(B, H, A)`, both in the units of the simulator or robot; every normaliser is part of
the policy. `chunk[:, 0]` is the action for the newest observation; the first `action_horizon` actions are executed
before the next call.

A *decision* is the smallest choice with a log-probability: a Gaussian action (T = 1) or one denoising transition (T =
number of network calls). `sample` and `decisions` of one policy call the same function for mean and standard deviation,
so the ratio of fresh data is exactly 1.
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
    """Chunk sampled for exploration, with the input of `decisions` to score it again."""

    chunk: Tensor  # (B, H, A) executed by the simulator
    record: Record  # {name: (B, ...)} input of `Policy.decisions`
    logp: Tensor  # (B, T) log-probabilities at sampling time
    memory: Tensor | None = None  # (B, 1, M) hidden state of a recurrent policy for its next decision

    @classmethod
    def unscored(cls, chunk: Tensor) -> Sample:
        """Sample without decisions, for learning from replay."""
        return cls(chunk, {}, chunk.new_zeros(len(chunk), 0))


@dataclass(frozen=True)
class DecisionOutput:
    """Log-probabilities and entropies of recorded decisions under the current parameters."""

    logp: Tensor  # (B, T) nats
    entropy: Tensor  # (B, T) nats


def chunk_mean(value: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the steps of a chunk, `(B, H)` -> `(B,)`, without padded steps; 0 for a row of padding."""
    if mask is None:
        return value.mean(1)
    mask = mask.to(value.dtype)
    return (value * mask).sum(1) / mask.sum(1).clamp(min=1)


class Policy(nn.Module, ABC):
    """Base class of every policy; subclasses implement the methods that they support."""

    name: ClassVar[str]  # key in `POLICIES`
    config_class: ClassVar[type[Any]]  # frozen dataclass of the settings
    contains_code: ClassVar[bool] = False  # its settings are a program, so that loading it requires a permission
    is_external: ClassVar[bool] = False  # opens a file, an endpoint or a library's policy when it is built
    scored_by_sample: ClassVar[bool] = True  # `decisions` scores the record of `sample`; else algorithms complete it
    fallback_hint: ClassVar[str] = ""  # of a wrapper: alternative if a method needs the wrapped policy
    spec: PolicySpec

    @property
    def device(self) -> torch.device:
        """Device of the parameters or buffers; the CPU if there are none."""
        return module_device(self) or torch.device("cpu")

    @abstractmethod
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return the chunk `(B, H, A)` to deploy.

        `deterministic` removes exploration noise. A generative head still samples its initial noise from `generator`:
        with a fixed seed, or one stream per row (`PerRowGenerator`), the chunk is a function of the observation.
        """

    @torch.no_grad()
    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """Sample `count` chunks `(B, count, H, A)` per observation like `act`; heads encode each observation once."""
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

        `mask` `(B, H)` is 0 on padded steps of the chunk, which do not contribute.
        """
        raise self._lacks("imitation_loss")

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample a chunk with exploration and record its decisions."""
        raise self._lacks("sample")

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Score recorded decisions under the current parameters; differentiable."""
        raise self._lacks("decisions")

    def next_hidden(self, obs: Observation) -> Tensor:
        """Memory `(B, 1, M)` of a recurrent policy after `obs`, whose key `memory` holds the last one; differentiable.

        The caller stores the memory, passes it with the next observation and passes zeros when an episode starts.
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
        """Merge `obs` into running observation statistics, if any, between iterations only.

        Sampling and scoring of one iteration must use the same transform.
        """
        for part in self.modules():
            if isinstance(part, ObservationEncoder):
                part.update_stats(obs)

    def set_progress(self, progress: float) -> None:
        """Set all schedules of the policy to `progress` in [0, 1] of training, between updates only."""

    def notes(self) -> list[str]:
        """Sentences for a report about the decisions since the last call, such as failures."""
        return []

    @property
    def is_steerable(self) -> bool:
        """Whether `decode` maps noise to chunks, so that the noise can steer the policy."""
        return type(self).decode is not Policy.decode

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape of the noise of `decode` and of the points of `field`, without the batch: the shape of a chunk.

        Networks of other libraries may use more rows and columns, of which the first H and A belong to the chunk.
        """
        return self.spec.horizon, self.spec.action_dim

    @property
    def nfe(self) -> int:
        """Network evaluations per chunk in `act`."""
        return 1

    def config_dict(self) -> dict[str, Any]:
        """Constructor configuration as plain JSON values; `spec` is stored separately."""
        return asdict(self.config)  # type: ignore[attr-defined]

    def _lacks(self, method: str) -> TypeError:
        return TypeError(f"Policy '{self.name}' has no method {method}; docs/methods/README.md lists the methods.")
