"""Autoregressive action tokens: each number of the chunk is a bin, given the observation and all earlier numbers.

The normalised range [-1, 1] is divided into equal bins (128 by default, as in PA-RL, Mark et al. 2024). A decoder-only
transformer takes the To observations, then the H * A tokens in time order, all dimensions of a step before the next
step. Each token is one decision: `decisions` scores a recorded chunk in one pass; sampling calls the same network once
per token with cached keys and values. Log-probabilities and entropies of the tokens are exact, for any distribution.

Use it for discrete or strongly multimodal actions, and with methods that train language models on their tokens.
Sampling takes H * A network calls, and the resolution is one bin: for long chunks or fine motion use a flow.
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
from robopolicy.policies.density import sample_category
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
                f"Bins cover [-1, 1], but action_normalization is '{self.action_normalization}'; use minmax, or "
                "identity for actions in this range."
            )


class AutoregressivePolicy(ExplicitPolicy):
    """One categorical decision per token, T = H * A; methods `act`, `sample`, `decisions`, `imitation_loss`."""

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
        nn.init.normal_(self.output.weight, std=0.02)  # nearly uniform initially
        nn.init.zeros_(self.output.bias)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Fit the normalisers; the scale of constant actions is so small that bins do not change them."""
        super().fit_normalizer(statistics)
        action_statistics = statistics.get("action", {})
        if self.config.action_normalization == "minmax" and not action_statistics.get("declared"):
            offset, scale = self.action_normalizer.offset, self.action_normalizer.scale
            low, high = (torch.as_tensor(action_statistics[name]).flatten() for name in ("min", "max"))
            constant = (high - low <= MIN_RANGE).to(scale.device)
            self.action_normalizer.set_transform(offset, torch.where(constant, MIN_RANGE, scale))

    @property
    def nfe(self) -> int:
        """One call per token."""
        return self.count

    def encode_actions(self, chunk: Tensor) -> Tensor:
        """Tokens `(B, T)` int64 of normalised actions `(B, H, A)`: the nearest bin, even out of range."""
        bins = self.config.bins
        return ((chunk.flatten(1) + 1) * (bins / 2)).floor().long().clamp(0, bins - 1)

    def decode_actions(self, tokens: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` at the centres of the bins `tokens` `(B, T)`."""
        centre = (tokens + 0.5) * (2 / self.config.bins) - 1
        return centre.view(-1, self.spec.horizon, self.spec.action_dim)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Sample the tokens, or take the most probable one each (`deterministic`)."""
        with torch.no_grad():
            return self._generate(self.features(obs), None if deterministic else generator, greedy=deterministic)[0]

    @torch.no_grad()
    def sample_many(self, obs: Observation, count: int, *, generator: Randomness = None) -> Tensor:
        """Sample all tokens from features that are computed once."""
        features = self.features(obs).repeat_interleave(count, 0)
        return self._generate(features, repeated(generator, count), greedy=False)[0].unflatten(0, (-1, count))

    @torch.no_grad()
    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Sample a chunk; the record holds its tokens `(B, T)`."""
        features = self.features(obs)
        chunk, tokens = self._generate(features, generator, greedy=False)
        return Sample(chunk, {"tokens": tokens}, _gather_tokens(self.log_probs(features, tokens), tokens))

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Log-probability and entropy `(B, T)` of each recorded token given the earlier tokens, in one network pass."""
        tokens = record["tokens"]
        log_probs = self.log_probs(self.features(obs), tokens)
        return DecisionOutput(_gather_tokens(log_probs, tokens), -(log_probs.exp() * log_probs).sum(-1))

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

        Padded steps are last in a chunk, so that valid tokens do not depend on them.
        """
        features = self.encode_for_training(obs, generator)
        target = self.action_normalizer.normalize(chunk)
        tokens = self.encode_actions(target)
        log_probs = self.log_probs(features, tokens)
        steps = (-_gather_tokens(log_probs, tokens)).view_as(target).sum(-1)  # (B, H)
        steps = steps + 0 * target.sum(-1)  # propagates NaN actions
        loss = chunk_mean(steps, mask)
        correct = (log_probs.detach().argmax(-1) == tokens).float().view_as(target).mean(-1)
        info = {"cross_entropy": loss.detach().mean(), "accuracy": chunk_mean(correct, mask).mean()}
        return (loss if weight is None else loss * weight), info

    def log_probs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities `(B, T, bins)` of every token given the earlier tokens, at features `(B, To, F)`."""
        inputs = torch.cat([self.feature_in(features), self.token_in(tokens[:, :-1])], 1)
        return self._next_log_probs(inputs, None)[0][:, features.shape[1] - 1 :]

    def _next_log_probs(self, inputs: Tensor, past: list[Past] | None) -> tuple[Tensor, list[Past]]:
        """Log-probabilities of the tokens after `inputs` `(B, L, width)`, for sampling and scoring."""
        hidden, read = self.decoder(inputs, past)
        return self.output(hidden).float().log_softmax(-1), read

    def _generate(self, features: Tensor, generator: Randomness, *, greedy: bool) -> tuple[Tensor, Tensor]:
        """Chunk `(B, H, A)` in env units and its tokens `(B, T)`."""
        draws = None if greedy else uniform((len(features), self.count), generator, features.device)
        tokens: list[Tensor] = []
        inputs, past = self.feature_in(features), None
        for index in range(self.count):
            log_probs, past = self._next_log_probs(inputs, past)
            last = log_probs[:, -1]
            tokens.append(last.argmax(-1) if draws is None else sample_category(last, draws[:, index]))
            inputs = self.token_in(tokens[-1]).unsqueeze(1)
        sampled = torch.stack(tokens, 1)
        chunk = self.decode_actions(sampled) + 0 * features.sum((1, 2))[:, None, None]  # NaN observations: NaN actions
        return self.action_normalizer.denormalize(chunk), sampled


def _gather_tokens(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Entries `(B, T)` of `log_probs` `(B, T, bins)` at `tokens` `(B, T)`."""
    return log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
