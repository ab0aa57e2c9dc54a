"""Autoregressive action tokens: each number of the chunk is a bin, chosen given the observation and all earlier ones.

The normalised range [-1, 1] is cut into equal bins (128 by default, as in PA-RL, Mark et al. 2024). A decoder-only
transformer reads the To observations, then the H * A tokens in time order, all dimensions of a step before the next
step. One decision per token: `decisions` scores a recorded chunk in one pass; sampling feeds the same network one token
at a time and keeps what it has read. Log-probabilities and entropies of the tokens are exact, and any distribution
fits.

Use it for discrete or strongly multimodal actions, and with everything that trains language models on their tokens.
Sampling takes H * A network calls and no action is finer than a bin: for long chunks or fine motion use a flow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import AtLeastTwo, Layers, PositiveInt
from robopolicy.errors import UserError
from robopolicy.nets.normalizer import MIN_RANGE, Statistics
from robopolicy.nets.transformer import CausalTransformer, Past
from robopolicy.policies.base import DecisionOutput, Info, Observation, PolicySpec, Record, Sample, chunk_mean
from robopolicy.policies.density import choose
from robopolicy.policies.heads.explicit import ExplicitConfig, ExplicitPolicy
from robopolicy.policies.noise import Randomness, repeated, uniform


@dataclass(frozen=True)
class AutoregressiveConfig(ExplicitConfig):
    """Architecture of an `AutoregressivePolicy`."""

    bins: AtLeastTwo = 128  # equal parts of the normalised range [-1, 1] of every action dimension
    transformer_width: PositiveInt = 128
    transformer_layers: Layers = 4
    transformer_heads: PositiveInt = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.action_normalization not in ("minmax", "identity"):
            raise UserError(
                f"Bins cover [-1, 1]; action_normalization '{self.action_normalization}' does not lead there, "
                "use minmax, or identity for actions that lie there already."
            )


class AutoregressivePolicy(ExplicitPolicy):
    """One categorical decision per token, T = H * A; verbs `act`, `sample`, `decisions`, `imitation_loss`."""

    name: ClassVar[str] = "autoregressive"
    config_class = AutoregressiveConfig
    config: AutoregressiveConfig

    def __init__(self, config: AutoregressiveConfig, spec: PolicySpec) -> None:
        super().__init__(config, spec)
        width = config.transformer_width
        self.count = spec.horizon * spec.action_dim  # T
        self.feature_in = nn.Linear(self.feature_dim, width)
        self.token_in = nn.Embedding(config.bins, width)
        self.decoder = CausalTransformer(
            width,
            config.transformer_layers,
            config.transformer_heads,
            length=spec.obs_horizon + self.count - 1,  # the last token is only predicted
        )
        self.output = nn.Linear(width, config.bins)
        nn.init.normal_(self.token_in.weight, std=0.02)
        nn.init.normal_(self.output.weight, std=0.02)  # nearly uniform to begin with
        nn.init.zeros_(self.output.bias)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers; a constant action comes back as it was, where bins of its unit would miss it."""
        super().fit_normalizer(statistics)
        found = statistics.get("action", {})
        if self.config.action_normalization == "minmax" and not found.get("declared"):
            scale = self.action_normalizer.scale
            span = torch.as_tensor(found["max"]).flatten() - torch.as_tensor(found["min"]).flatten()
            scale[(span <= MIN_RANGE).to(scale.device)] = MIN_RANGE

    @property
    def nfe(self) -> int:
        """One per token."""
        return self.count

    def encode_actions(self, chunk: Tensor) -> Tensor:
        """Tokens `(B, T)` int64 of normalised actions `(B, H, A)`: the nearest bin, also of actions out of range."""
        bins = self.config.bins
        return ((chunk.flatten(1) + 1) * (bins / 2)).floor().long().clamp(0, bins - 1)

    def decode_actions(self, tokens: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` in the middle of the bins `tokens` `(B, T)`; at most half a bin off."""
        middle = (tokens + 0.5) * (2 / self.config.bins) - 1
        return middle.view(-1, self.spec.horizon, self.spec.action_dim)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The likeliest token each time (`deterministic`) or a draw."""
        with torch.no_grad():
            return self._generate(self.features(obs), None if deterministic else generator, greedy=deterministic)[0]

    @torch.no_grad()
    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """Draws of all tokens at features that are computed once."""
        features = self.features(obs).repeat_interleave(count, 0)
        return self._generate(features, repeated(generator, count), greedy=False)[0].unflatten(0, (-1, count))

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Draw a chunk; the record holds its tokens `(B, T)`."""
        features = self.features(obs)
        chunk, tokens = self._generate(features, generator, greedy=False)
        return Sample(chunk, {"tokens": tokens}, _taken(self.log_probs(features, tokens), tokens))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, T)` of each recorded token given the ones before it; one network pass."""
        tokens = record["tokens"]
        log_probs = self.log_probs(self.features(obs), tokens)
        return DecisionOutput(_taken(log_probs, tokens), -(log_probs.exp() * log_probs).sum(-1))

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Cross-entropy `(B,)` summed over the action dimensions, averaged over the valid steps [nats per step].

        Padded steps come last in a chunk, so that valid tokens never depend on them.
        """
        features = self.encode_for_training(obs, generator)
        target = self.action_normalizer.normalize(chunk)
        tokens = self.encode_actions(target)
        log_probs = self.log_probs(features, tokens)
        steps = (-_taken(log_probs, tokens)).view_as(target).sum(-1)  # (B, H)
        steps = steps + 0 * target.sum(-1)  # a NaN among the actions must not pass as a token
        loss = chunk_mean(steps, mask)
        right = (log_probs.detach().argmax(-1) == tokens).float().view_as(target).mean(-1)
        info = {"cross_entropy": loss.detach().mean(), "accuracy": chunk_mean(right, mask).mean()}
        return (loss if weight is None else loss * weight), info

    def log_probs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities `(B, T, bins)` of every token of a chunk given all before it, at features `(B, To, F)`."""
        inputs = torch.cat([self.feature_in(features), self.token_in(tokens[:, :-1])], 1)
        return self._read(inputs, None)[0][:, features.shape[1] - 1 :]

    def _read(self, inputs: Tensor, past: list[Past] | None) -> tuple[Tensor, list[Past]]:
        """Log-probabilities of what follows each of `inputs` `(B, L, width)`: the one function behind both verbs."""
        hidden, read = self.decoder(inputs, past)
        return self.output(hidden).float().log_softmax(-1), read

    def _generate(self, features: Tensor, generator: Randomness, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """Chunk `(B, H, A)` in env units and its tokens `(B, T)`."""
        draws = None if greedy else uniform((len(features), self.count), generator, features.device)
        tokens: list[Tensor] = []
        inputs, past = self.feature_in(features), None
        for index in range(self.count):
            log_probs, past = self._read(inputs, past)
            last = log_probs[:, -1]
            tokens.append(last.argmax(-1) if draws is None else choose(last, draws[:, index]))
            inputs = self.token_in(tokens[-1]).unsqueeze(1)
        drawn = torch.stack(tokens, 1)
        chunk = self.decode_actions(drawn) + 0 * features.sum((1, 2))[:, None, None]  # NaN observations: NaN actions
        return self.action_normalizer.denormalize(chunk), drawn


def _taken(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Entries `(B, T)` of `log_probs` `(B, T, bins)` at `tokens` `(B, T)`."""
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
