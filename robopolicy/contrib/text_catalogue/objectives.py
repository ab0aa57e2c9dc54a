"""Objectives on whole groups: regression, sets, embeddings, imitation, rows of a teacher."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from robopolicy.constraints import NonNegative, NonNegativeInt, Positive
from robopolicy.contrib.text_catalogue.pair_objectives import group_pairs, squared_difference
from robopolicy.contrib.text_catalogue.targets import DIVERGENCES
from robopolicy.core.aggregate import masked_mean, sequence_mean
from robopolicy.core.decisions import Decisions, Partition, by_group, by_trajectory, by_unit, first_rows
from robopolicy.core.objectives import preference_pairs, scores
from robopolicy.core.ratios import log_ratio
from robopolicy.core.segments import Segments

Info = dict[str, Tensor]
REGRESSED: dict[str, Partition] = {"unit": by_unit, "trajectory": by_trajectory}


@dataclass(frozen=True)
class PairRegression:
    """CoPG (Flet-Berliac et al. 2024): squared differences of `R - beta log pi / pi_ref` within a group.

    At 0 the policy is `pi_ref exp(R / beta)` up to normalisation, for trajectories of any policy; two trajectories give
    IPO. On policy, the gradient equals RLOO with the penalised reward.
    """

    beta: NonNegative = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over trajectories the mean over the others of their group; each pair counts once."""
        shaped = advantage[:, 0] - self.beta * scores(logp, decisions)
        first, second = group_pairs(decisions)
        if len(first) == 0:
            return 0.0 * shaped.sum(), {}
        others = Segments(first, torch.ones_like(first, dtype=torch.bool))
        error = others.mean(squared_difference(shaped[first], shaped[second], 0.0))
        return 0.5 * error.sum() / others.size, {"residual": error.mean().detach()}


@dataclass(frozen=True)
class StepRegression:
    """Direct advantage policy optimisation: `(beta log pi / pi_ref - A)^2` of each unit, a step or a chunk.

    Source: Liu et al. 2024.

    The advantage of a unit is the mean over its decisions. At 0 the policy is `pi_ref exp(A / beta)`. With the level
    "trajectory" whole rollouts are regressed (A*-PO).
    """

    beta: NonNegative = 0.1
    level: str = "unit"  # unit | trajectory

    def __post_init__(self) -> None:
        if self.level not in REGRESSED:
            raise ValueError(f"Level must be one of {', '.join(REGRESSED)}, got {self.level!r}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over units or trajectories."""
        segments = Segments(REGRESSED[self.level](decisions), decisions.valid())
        gain = segments.mean(advantage.expand_as(logp))
        change = segments.sum(log_ratio(logp, decisions.require("logp_ref"), decisions))
        error = squared_difference(self.beta * change, gain, 0.0)
        loss = error.sum() / (segments.count > 0).sum().clamp(min=1)
        return loss, {"residual": loss.detach()}


@dataclass(frozen=True)
class Discriminative:
    """DisCO (Li et al. 2025): scores of successes minus scores of failures, in groups with both.

    The score is the mean log-probability of a trajectory, or its mean ratio to the old policy. With a `temperature` tau
    failures are aggregated by `tau log mean exp(score / tau)`, so that the likeliest ones dominate; otherwise by their
    mean, which is a policy gradient with the advantage `(R - p) / (p (1 - p))`. Combine it with `kl_barrier`.
    """

    score: str = "logp"  # logp | ratio
    temperature: Positive | None = None

    def __post_init__(self) -> None:
        if self.score not in ("logp", "ratio"):
            raise ValueError(f"Discriminative score must be 'logp' or 'ratio', got {self.score!r}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over groups with successes (advantage above 0) and failures."""
        change = log_ratio(logp, decisions.logp_old, decisions)
        value = change.exp() if self.score == "ratio" else logp
        first = first_rows(decisions)
        rows = Segments(by_trajectory(decisions), decisions.valid())
        mean = rows.broadcast(rows.mean(value))[first, :1]  # (S, 1)
        good = advantage[first, :1] > 0
        ids = by_group(decisions)[first]
        winners, losers = Segments(ids, good), Segments(ids, ~good)
        if self.temperature is None:
            negative = losers.mean(mean)
        else:
            top = losers.largest(mean).detach().clamp(min=-1e30)  # keeps the exponentials in range
            share = losers.mean(((mean - losers.broadcast(top)) / self.temperature).clamp(max=0.0).exp())
            negative = top + self.temperature * share.clamp(min=1e-30).log()
        both = (winners.count > 0) & (losers.count > 0)
        margin = (winners.mean(mean) - negative).masked_fill(~both, 0.0)
        groups = both.sum()
        loss = -margin.sum() / groups.clamp(min=1)
        return loss, {"margin": -loss.detach(), "mixed_groups": groups.to(logp.dtype) / max(both.numel(), 1)}


@dataclass(frozen=True)
class SetPreference:
    """GEPO (Wu et al. 2025): preference of the winners of a group, all equally good, over the rest.

    `-log sigmoid(beta (mean r+ - mean r-)) + variance Var(r+)` with `r = log pi / pi_ref` of a trajectory; the second
    term makes the winners equally likely. One winner and one loser: DPO.
    """

    beta: NonNegative = 0.1
    variance: Positive = 1.0

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over groups of different advantages; winners have the highest advantage."""
        first = first_rows(decisions)
        score, value = scores(logp, decisions)[first].unsqueeze(1), advantage[first, :1]
        ids = by_group(decisions)[first]
        members = Segments(ids, torch.ones_like(value, dtype=torch.bool))
        best = value >= members.broadcast(members.largest(value))
        winners, losers = Segments(ids, best), Segments(ids, ~best)
        loss = -functional.logsigmoid(self.beta * (winners.mean(score) - losers.mean(score)))
        loss = loss + self.variance * winners.mean((score - winners.broadcast(winners.mean(score))) ** 2)
        both = losers.count > 0
        return loss.masked_fill(~both, 0.0).sum() / both.sum().clamp(min=1), {"mixed_groups": both.to(score).mean()}


@dataclass(frozen=True)
class EmbeddingTriplet:
    """OPPO (Kang et al. 2023): a learned condition nearer to preferred trajectories than to others.

    `extra["embedding"]` (N, Z) is the embedding that conditions the log-probabilities of each trajectory, and
    `extra["best"]` (N, Z) the learned condition of deployment, the same in all rows. Both are recomputed for every
    minibatch with gradients:
    `max(0, |best - z+|^2 - |best - z-|^2 + margin) + norm (|z| - 1)^2`.
    """

    margin: NonNegative = 1.0
    norm: Positive = 1.0  # weight of the unit length of the embeddings

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Average over all ordered pairs of a group, and over the embeddings of all rows."""
        embedding, best = decisions.require_extra("embedding"), decisions.require_extra("best")
        chosen, rejected = preference_pairs(decisions, advantage[:, 0])
        near = (best[chosen] - embedding[chosen]).square().sum(1)
        far = (best[chosen] - embedding[rejected]).square().sum(1)
        loss = (near - far + self.margin).clamp(min=0.0).sum() / max(len(chosen), 1)
        squares = embedding.square().sum(1)
        size = torch.where(squares > 0, squares, 1.0).sqrt() * (squares > 0)  # gradient 0 at 0
        length = (size - 1.0).square().mean()
        ordered = (near < far).to(near.dtype).sum() / max(len(chosen), 1)
        return loss + self.norm * length, {"accuracy": ordered.detach()}


@dataclass(frozen=True)
class DivergenceImitation:
    """`-f'(pi / pi_ref)` of every demonstrated decision.

    The reverse KL gives the negative log-likelihood, whose gradient never vanishes; the other gradients vanish as the
    policy leaves the reference, for Jensen-Shannon with `sigmoid(-log pi / pi_ref)`.
    """

    divergence: str = "jensen_shannon"  # reverse_kl | jensen_shannon | forward_kl | chi_squared

    def __post_init__(self) -> None:
        smooth = [name for name in DIVERGENCES if name != "total_variation"]  # its derivative is constant
        if self.divergence not in smooth:
            raise ValueError(f"Unknown divergence '{self.divergence}' to imitate by; known: {', '.join(smooth)}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Average over decisions."""
        mask, change = decisions.valid(), log_ratio(logp, decisions.require("logp_ref"), decisions)
        return masked_mean(-DIVERGENCES[self.divergence](change), mask), {"kl_ref": masked_mean(change.detach(), mask)}


@dataclass(frozen=True)
class OffPolicyRows:
    """`-A p / (p + shape)` with the current probability p of each decision of a teacher's rows.

    Source: AMPO, Yuan et al. 2025.

    It needs no ratio to an unknown behavior policy and no clip: unlikely decisions have the largest gradients. The mean
    is over all decisions of the batch; with an estimator of weight `source_weight` and aggregation "token_mean", it is
    one mean over both kinds of rows.
    """

    source: NonNegativeInt = 2  # of the teacher's rows
    shape: float = 0.1

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Compute the loss, and the mean probability of the teacher's decisions; 0 without any."""
        valid = decisions.valid()
        taught = valid & (decisions.require("source") == self.source).unsqueeze(1)
        probability = logp.clamp(max=0.0).exp()  # a density may exceed 1
        losses = (-advantage * probability / (probability + self.shape)).masked_fill(~taught, 0.0)
        return masked_mean(losses, valid), {"taught_probability": masked_mean(probability.detach(), taught)}


@dataclass(frozen=True)
class ReplayedRows:
    """`-A min(ratio, 1 + high)` of the rows of an earlier batch, in addition to the loss of the new rows.

    Source: PIPO, Wang et al. 2026.

    The ratio is bounded only above, for both signs of A. Use it with an estimator with the mask `source`.
    """

    source: NonNegativeInt = 1  # of the rows
    high: NonNegative = 0.2

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, Info]:
        """Average over trajectories the mean over their decisions; 0 without any."""
        rows = decisions.valid() & (decisions.require("source") == self.source).unsqueeze(1)
        ratio = log_ratio(logp, decisions.logp_old, decisions).exp()
        loss = sequence_mean(-advantage * ratio.clamp(max=1.0 + self.high), rows, decisions)
        return loss, {"repeated_ratio": masked_mean(ratio.detach(), rows)}
