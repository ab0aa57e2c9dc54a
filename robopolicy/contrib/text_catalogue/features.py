"""Features of a causal model for single recipes.

    features (N, D + 2)                mean last state of the response, mean and largest entropy (Choi et al. 2026)
    prompt_features (N, D)             mean last hidden state over the first prompt (Zhang et al. 2026)
    cluster (N,)                       cluster of trajectories of the group with similar features (Xu et al. 2025)
    waad, fai (N, T)                   mean attended distance, and attention received later (Li et al. 2025)
    collision, collision3 (N, T)       probability that two or three draws agree (Melo et al. 2025)
    prompt_confidence (N,)             geometric mean probability of the prompt's least likely tokens (Li et al. 2026)

Attention is the mean over all heads and layers; planning heads are not selected.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.contrib.text_catalogue.bonuses import NoveltyBonus, confidence
from robopolicy.contrib.text_catalogue.factors import attention_distance, future_attention
from robopolicy.core.decisions import Decisions
from robopolicy.text.annotators import FeatureExtractor, Options, collision_features, score_inputs
from robopolicy.text.model import body_of
from robopolicy.text.policy import TextPolicy

CLUSTERS = 3  # maximum number per group


@torch.no_grad()
def attention(policy: TextPolicy, tokens: Tensor) -> Tensor:
    """Compute the mean attention over heads and layers, `(N, L, L)`, of later to earlier tokens `(N, L)`."""
    model: Any = policy.model
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")  # returns attention weights
    try:
        out = body_of(model)(input_ids=tokens, output_attentions=True, use_cache=False)
        return torch.stack([layer.float().mean(1) for layer in out.attentions]).mean(0)
    finally:
        model.set_attn_implementation(implementation)


@torch.no_grad()
def written_features(policy: TextPolicy, tokens: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean last hidden state `(N, D)` of the decisions; arguments of `TextPolicy.score`."""
    written = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    row, step = mask.nonzero(as_tuple=True)
    written[row, start[row] + step] = True
    return _mean(policy.hidden(tokens).float(), written)


@torch.no_grad()
def prompt_features(policy: TextPolicy, tokens: Tensor, start: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compute `prompt_features`; arguments of `TextPolicy.score`."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return {"prompt_features": _mean(policy.hidden(tokens).float(), places < start[:, None])}


def probe_features(policy: TextPolicy, rows: Decisions) -> dict[str, Tensor]:
    """Compute `features` with the recorded entropies."""
    hidden = written_features(policy, *score_inputs(rows))
    entropy, mask = rows.require("entropy").masked_fill(~rows.valid(), 0.0), rows.valid()
    sizes = torch.stack([entropy.sum(1) / mask.sum(1).clamp(min=1), entropy.amax(1)], 1)
    return {"features": torch.cat([hidden, sizes.to(hidden)], 1)}


@torch.no_grad()
def attention_summary(policy: TextPolicy, tokens: Tensor, start: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Compute `waad` and `fai`, 0 outside the mask; arguments of `TextPolicy.score`."""
    found = attention(policy, tokens)
    row, step = mask.nonzero(as_tuple=True)
    place = start[row] + step
    columns = torch.arange(mask.shape[1], device=mask.device)
    end = start + torch.where(mask, columns + 1, 0).amax(1)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    found = found * (places < end[:, None])[..., None]  # no attention from positions after the end
    blank = found.new_zeros(mask.shape)
    return {
        "waad": blank.masked_scatter(mask, attention_distance(found)[row, place - 1]),  # of the predicting state
        "fai": blank.masked_scatter(mask, future_attention(found)[row, place]),
    }


@torch.no_grad()
def prompt_confidence(policy: TextPolicy, rows: Decisions, share: float) -> dict[str, Tensor]:
    """Compute `prompt_confidence` over a `share` of the tokens after the first."""
    tokens, start, _ = score_inputs(rows)
    one = torch.ones_like(start)
    mask = torch.arange(int(start.max()) - 1, device=tokens.device) < (start - 1)[:, None]
    logp = policy.score(tokens, one, mask, one.float()).logp
    return {"prompt_confidence": confidence(Decisions(logp, mask=mask), share)[:, 0]}


@torch.no_grad()
def clustered(policy: TextPolicy, rows: Decisions) -> dict[str, Tensor]:
    """Compute `cluster` ids within each group; the rows must contain complete groups."""
    features = written_features(policy, *score_inputs(rows))
    group, result = rows.require("group"), torch.zeros(len(rows), dtype=torch.int64, device=features.device)
    for number, key in enumerate(group.unique().tolist()):
        members = (group == key).nonzero()[:, 0]
        result[members] = number * CLUSTERS + k_means(features[members], CLUSTERS)
    return {"cluster": result}


def k_means(points: Tensor, count: int, rounds: int = 10) -> Tensor:
    """Cluster points `(M, D)` and return ids below `count` `(M,)`; the initial centres are distant points."""
    centres = points[:1]
    while len(centres) < min(count, len(points)):
        centres = torch.cat([centres, points[torch.cdist(points, centres).amin(1).argmax()][None]])
    nearest = torch.cdist(points, centres).argmin(1)
    for _ in range(rounds):
        share = torch.nn.functional.one_hot(nearest, len(centres)).to(points.dtype)
        size = share.sum(0)[:, None]
        centres = torch.where(size > 0, share.T @ points / size.clamp(min=1), centres)
        nearest = torch.cdist(points, centres).argmin(1)
    return nearest


def _mean(hidden: Tensor, chosen: Tensor) -> Tensor:
    weight = chosen.to(hidden.dtype)
    return torch.einsum("nl,nld->nd", weight, hidden) / weight.sum(1, keepdim=True).clamp(min=1)


class WrittenFeatures(FeatureExtractor):
    """`features`, for a probe of returns."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute the fields."""
        return probe_features(policy, rows)


class PromptFeatures(FeatureExtractor):
    """`prompt_features`, for a baseline by prompt."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute the fields."""
        return prompt_features(policy, *score_inputs(rows))


class Attention(FeatureExtractor):
    """`waad` and `fai`."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute the fields."""
        return attention_summary(policy, *score_inputs(rows))


class TripleCollisions(FeatureExtractor):
    """`collision` and `collision3`."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute the fields."""
        return collision_features(policy, rows, 2, 3)


class PromptConfidence(FeatureExtractor):
    """`prompt_confidence`."""

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute the fields."""
        return prompt_confidence(policy, rows, options.get("share", NoveltyBonus.share))


class Clusters(FeatureExtractor):
    """`cluster`."""

    needs_full_batch: ClassVar[bool] = True

    def __call__(self, policy: TextPolicy, rows: Decisions, options: Options) -> dict[str, Tensor]:
        """Compute the fields."""
        return clustered(policy, rows)
