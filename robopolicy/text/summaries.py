"""What a causal model shows of itself beside probabilities, as recipes ask for it.

    features (N, D + 2)                of what was written: mean last hidden state, mean and largest entropy (S030)
    prompt_features (N, D)             mean last hidden state over the first prompt (S004)
    cluster (N,)                       which of the group's attempts have similar features (S135)
    waad, fai (N, T)                   distance a decision attends to, and attention it receives later (S130)
    collision, collision3 (N, T)       probability that two draws agree, and that three do (S052)
    prompt_confidence (N,)             geometric mean probability of the prompt's least likely tokens (S158)

Attention is the mean over all heads and layers; which heads plan is not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.advantages.bonuses import Rarity, confidence
from robopolicy.core.advantages.factors import attention_distance, future_attention
from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.text.model import body_of, head_of
from robopolicy.text.policy import TextPolicy
from robopolicy.text.scoring import collisions

ROWS = 64  # conversations at once: attention is rows x heads x length x length numbers
CLUSTERS = 3  # of a group, at most


@torch.no_grad()
def attention(policy: TextPolicy, tokens: Tensor) -> Tensor:
    """Attention `(N, L, L)` of later to earlier tokens of conversations `(N, L)`, mean over heads and layers."""
    model: Any = policy.model
    usual = model.config._attn_implementation
    model.set_attn_implementation("eager")  # the others do not say what they attend to
    try:
        out = body_of(model)(input_ids=tokens, output_attentions=True, use_cache=False)
        return torch.stack([layer.float().mean(1) for layer in out.attentions]).mean(0)
    finally:
        model.set_attn_implementation(usual)


@torch.no_grad()
def written_features(policy: TextPolicy, tokens: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """Mean last hidden state `(N, D)` of what was written; arguments as of `TextPolicy.score`."""
    written = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    row, step = mask.nonzero(as_tuple=True)
    written[row, start[row] + step] = True
    return _mean(policy.hidden(tokens).float(), written)


@torch.no_grad()
def prompt_features(policy: TextPolicy, tokens: Tensor, start: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`prompt_features`; arguments as of `TextPolicy.score`."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return {"prompt_features": _mean(policy.hidden(tokens).float(), places < start[:, None])}


def probe_features(policy: TextPolicy, rows: Decisions) -> dict[str, Tensor]:
    """`features`, with the entropies that the rows recorded."""
    hidden = written_features(policy, *_conversations(rows))
    entropy, mask = rows.need("entropy").masked_fill(~rows.valid(), 0.0), rows.valid()
    sizes = torch.stack([entropy.sum(1) / mask.sum(1).clamp(min=1), entropy.amax(1)], 1)
    return {"features": torch.cat([hidden, sizes.to(hidden)], 1)}


@torch.no_grad()
def attention_summary(policy: TextPolicy, tokens: Tensor, start: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`waad` and `fai`, 0 where the policy did not choose; arguments as of `TextPolicy.score`."""
    found = attention(policy, tokens)
    row, step = mask.nonzero(as_tuple=True)
    place = start[row] + step
    columns = torch.arange(mask.shape[1], device=mask.device)
    end = start + torch.where(mask, columns + 1, 0).amax(1)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    found = found * (places < end[:, None])[..., None]  # nobody looks from behind the end
    blank = found.new_zeros(mask.shape)
    return {
        "waad": blank.masked_scatter(mask, attention_distance(found)[row, place - 1]),  # of the state that chose
        "fai": blank.masked_scatter(mask, future_attention(found)[row, place]),
    }


@torch.no_grad()
def choice_norms(policy: TextPolicy, rows: Decisions, *draws: int) -> dict[str, Tensor]:
    """`collision`, or with three draws `collision3`, at the temperature of the rows."""
    tokens, start, mask = _conversations(rows)
    heat = rows.extra["temperature"][mask.nonzero(as_tuple=True)[0]]
    head = head_of(policy.model)
    hidden, result = policy.states(tokens, start, mask), dict[str, Tensor]()
    for number in draws:
        found = collisions(hidden, head.weight, head.bias, heat, number)
        name = "collision" if number == 2 else f"collision{number}"
        result[name] = found.new_zeros(mask.shape).masked_scatter(mask, found)
    return result


@torch.no_grad()
def prompt_confidence(policy: TextPolicy, rows: Decisions, share: float) -> dict[str, Tensor]:
    """`prompt_confidence` over a `share` of the tokens behind the first."""
    tokens, start, _ = _conversations(rows)
    one = torch.ones_like(start)
    mask = torch.arange(int(start.max()) - 1, device=tokens.device) < (start - 1)[:, None]
    logp = policy.score(tokens, one, mask, one.float()).logp
    return {"prompt_confidence": confidence(Decisions(logp, mask=mask), share)[:, 0]}


@torch.no_grad()
def clustered(policy: TextPolicy, rows: Decisions) -> dict[str, Tensor]:
    """`cluster`, told apart within each group, whose attempts have to be among the rows."""
    features = written_features(policy, *_conversations(rows))
    group, result = rows.need("group"), torch.zeros(len(rows), dtype=torch.int64, device=features.device)
    for number, key in enumerate(group.unique().tolist()):
        members = (group == key).nonzero()[:, 0]
        result[members] = number * CLUSTERS + k_means(features[members], CLUSTERS)
    return {"cluster": result}


def k_means(points: Tensor, count: int, rounds: int = 10) -> Tensor:
    """Numbers below `count` `(M,)` of the clusters of points `(M, D)`, begun at points far from each other."""
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


Options = Mapping[str, Any]
SUMMARIES: dict[str, Callable[[TextPolicy, Decisions, Options], dict[str, Tensor]]] = {
    "probe_baseline": lambda policy, rows, _: probe_features(policy, rows),
    "context_baseline": lambda policy, rows, _: prompt_features(policy, *_conversations(rows)),
    "rhythm": lambda policy, rows, _: attention_summary(policy, *_conversations(rows)),
    "optimal_token_baseline": lambda policy, rows, _: choice_norms(policy, rows, 2),
    "predicted_step": lambda policy, rows, _: choice_norms(policy, rows, 2, 3),
    "rarity": lambda policy, rows, options: prompt_confidence(policy, rows, options.get("share", Rarity.share)),
    "cluster": lambda policy, rows, _: clustered(policy, rows),
}
"""Part of a recipe, or key that one reads -> what it asks for, given the options of the part."""

WHOLE = ("cluster",)  # not in blocks


def summaries_of(recipe: Mapping[str, Any]) -> dict[str, Options]:
    """Those of `SUMMARIES` that a plain recipe names, with the options of the part."""
    named = dict(named_parts(recipe))
    return {name: named[name] for name in SUMMARIES if name in named}


def summarised(policy: TextPolicy, rows: Decisions, wanted: Mapping[str, Options]) -> Decisions:
    """The rows with what parts read in `extra`.

    Raises:
        UserError: The policy is not causal.
    """
    if wanted and not policy.causal:
        raise UserError(
            f"Part '{next(iter(wanted))}' of this recipe reads a causal model (policy=text), not '{policy.name}'."
        )
    extra = dict(rows.extra)
    for name, options in wanted.items():
        size = len(rows) if name in WHOLE else ROWS
        blocks = (rows.select(slice(at, at + size)) for at in range(0, len(rows), size))
        parts = [SUMMARIES[name](policy, block, options) for block in blocks]
        extra |= {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return rows.with_fields(extra=extra)


def named_parts(plain: Any) -> Iterator[tuple[str, Options]]:
    """Every string among the values of a plain recipe, with the mapping in which it stands."""
    if isinstance(plain, Mapping):
        for value in plain.values():
            if isinstance(value, str):
                yield value, plain
            else:
                yield from named_parts(value)
    elif isinstance(plain, list | tuple):
        for value in plain:
            yield from [(value, {})] if isinstance(value, str) else named_parts(value)


def _conversations(rows: Decisions) -> tuple[Tensor, Tensor, Tensor]:
    """`tokens`, `start` and `mask`, as `TextPolicy.score` takes them."""
    return rows.extra["tokens"], rows.extra["start"], rows.valid()


def _mean(hidden: Tensor, chosen: Tensor) -> Tensor:
    weight = chosen.to(hidden.dtype)
    return torch.einsum("nl,nld->nd", weight, hidden) / weight.sum(1, keepdim=True).clamp(min=1)
