"""What a causal model shows of itself beside probabilities: hidden states and attention, as recipes ask for them.

    features, prompt_features (N, D)   mean last hidden state over what was written, and over the first prompt (S030)
    waad, fai (N, T)                   distance a decision attends to, and attention it receives later (S130)

Attention is the mean over all heads and layers; which heads plan is not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from robopolicy.core.advantages.factors import attention_distance, future_attention
from robopolicy.core.decisions import Decisions
from robopolicy.errors import UserError
from robopolicy.text.model import body_of
from robopolicy.text.policy import TextPolicy

ROWS = 64  # conversations at once: attention is rows x heads x length x length numbers


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
def hidden_features(policy: TextPolicy, tokens: Tensor, start: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """`features` and `prompt_features`; arguments as of `TextPolicy.score`."""
    hidden = policy.hidden(tokens).float()
    places = torch.arange(tokens.shape[1], device=tokens.device)
    written = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
    row, step = mask.nonzero(as_tuple=True)
    written[row, start[row] + step] = True
    return {
        "features": _mean(hidden, written),
        "prompt_features": _mean(hidden, places < start[:, None]),
    }


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


SUMMARIES: dict[str, Callable[[TextPolicy, Tensor, Tensor, Tensor], dict[str, Tensor]]] = {
    "probe_baseline": hidden_features,
    "rhythm": attention_summary,
}
"""Part of a recipe -> what it reads."""


def summaries_of(recipe: Mapping[str, Any]) -> list[str]:
    """Keys of `SUMMARIES` that a plain recipe names."""
    names = set(_names(recipe))
    return [name for name in SUMMARIES if name in names]


def summarised(policy: TextPolicy, rows: Decisions, wanted: Sequence[str]) -> Decisions:
    """The rows with what parts read in `extra`.

    Raises:
        UserError: The policy is not causal.
    """
    if wanted and not policy.causal:
        raise UserError(f"Part '{wanted[0]}' of this recipe reads a causal model (policy=text), not '{policy.name}'.")
    extra = dict(rows.extra)
    for name in wanted:
        parts = [
            SUMMARIES[name](policy, part.extra["tokens"], part.extra["start"], part.valid())
            for part in (rows.select(slice(at, at + ROWS)) for at in range(0, len(rows), ROWS))
        ]
        extra |= {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return rows.with_fields(extra=extra)


def _mean(hidden: Tensor, chosen: Tensor) -> Tensor:
    weight = chosen.to(hidden.dtype)
    return torch.einsum("nl,nld->nd", weight, hidden) / weight.sum(1, keepdim=True).clamp(min=1)


def _names(plain: Any) -> list[str]:
    if isinstance(plain, Mapping):
        return [name for value in plain.values() for name in _names(value)]
    if isinstance(plain, list | tuple):
        return [name for value in plain for name in _names(value)]
    return [plain] if isinstance(plain, str) else []
