"""Sampling from a causal language model: left-padded prompts, one cache, log-probabilities of sampled tokens.

Each row uses one uniform number per token, drawn before generation starts, so its tokens do not depend on the other
rows (except for rounding). Equal prompts are processed once. Finished rows are removed once half of the batch has
finished, so short completions do not pay for long ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.text.model import body_of, head_of
from robopolicy.text.tokenizers import left_padded


def masked_log_softmax(logits: Tensor, support: Tensor) -> Tensor:
    """Compute log-probabilities `(..., V)` renormalised on a support, bool `(..., V)`; -inf outside."""
    return logits.masked_fill(~support, -torch.inf).log_softmax(-1)


def top_p_support(logits: Tensor, p: float) -> Tensor:
    """Compute the nucleus, bool `(..., V)`: the likeliest tokens with a total probability of at least `p`.

    NLPO (Ramamurthy et al. 2022) takes it from a lagged copy of the policy and restricts sampling and scoring to it.
    """
    probability, order = logits.softmax(-1).sort(dim=-1, descending=True)
    before = probability.cumsum(-1) - probability
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before < p)


MIN_SAVING = 3  # the saved fraction of tokens must be at least 1 / MIN_SAVING


@dataclass(frozen=True)
class Generation:
    """N completions of at most T tokens."""

    tokens: Tensor  # (N, T) int64, `eos` included, then padding
    mask: Tensor  # (N, T) bool, sampled tokens
    logp: Tensor  # (N, T) float32 at the sampling temperature, 0 outside the mask
    entropy: Tensor  # (N, T) float32 of the sampling distributions, 0 outside the mask
    truncated: Tensor  # (N,) bool, the budget ended before the completion did
    order: Tensor  # (N, T) int64, 1 + the step in which a token was sampled, 0 outside the mask
    support: Tensor | None = None  # (N, T, V) bool, allowed tokens; None: all

    def completions(self) -> list[list[int]]:
        """Return the tokens of each row, `eos` included."""
        return [row[real].tolist() for row, real in zip(self.tokens, self.mask, strict=True)]


@dataclass
class _IncrementalModel:
    """A model with the cache of a batch."""

    model: nn.Module
    hidden: Tensor  # (R, D) after the last token
    cache: Any

    @classmethod
    def read_prompts(cls, model: nn.Module, prompt: Tensor, real: Tensor, copies: Tensor) -> _IncrementalModel:
        """Process the prompts and copy their cache."""
        out = run_body(model, prompt, real, positions(real), None)
        cache_of(out).batch_select_indices(copies)
        return cls(model, out.last_hidden_state[:, -1][copies], cache_of(out))

    def step(self, chosen: Tensor, attended: Tensor, position: Tensor) -> None:
        """Process the next token `(R,)` of each row."""
        out = run_body(self.model, chosen[:, None], attended, position[:, None], self.cache)
        self.hidden, self.cache = out.last_hidden_state[:, -1], cache_of(out)

    def logits(self) -> Tensor:
        """Compute the logits `(R, V)` of the next tokens."""
        return logits_of(self.model, self.hidden)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    draws: Tensor | None,
    *,
    budget: int,
    temperature: Tensor,
    eos: int,
    pad: int,
    guide: nn.Module | None = None,
    top_p: float = 1.0,
    allowed: Callable[[str], Tensor] | None = None,
    token_text: Callable[[int], str] = chr,
    prefill: Sequence[str] = (),
) -> Generation:
    """Complete every prompt; equal prompts are processed once.

    Args:
        model: Causal language model.
        prompts: Tokens of the N prompts.
        draws: (N, budget) uniform numbers in [0, 1); None: greedy.
        budget: Maximum number of tokens of a completion.
        temperature: (N,) sampling temperatures.
        eos: Token that ends a completion.
        pad: Padding token.
        guide: Model whose nucleus of probability `top_p` contains the allowed tokens.
        top_p: Probability of the nucleus.
        allowed: Returns the tokens (V,) bool that may follow the beginning of a response.
        token_text: Text of a token, for `allowed`.
        prefill: Given beginning of each response; empty: none.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    places: dict[tuple[int, ...], int] = {}  # prompt -> row of the prompts that are processed
    copies = torch.tensor([places.setdefault(tuple(prompt), len(places)) for prompt in prompts], device=device)
    prompt, real = (value.to(device) for value in left_padded(list(places), pad))
    temperature = temperature.to(device)
    draws = None if draws is None else draws.to(device)
    count = len(prompts)
    tokens = torch.full((count, budget), pad, dtype=torch.int64, device=device)
    logp, entropy = (torch.zeros(count, budget, device=device) for _ in range(2))
    mask = torch.zeros(count, budget, dtype=torch.bool, device=device)
    models = [_IncrementalModel.read_prompts(one, prompt, real, copies) for one in (model, guide) if one is not None]
    supports: list[Tensor] = []  # (N, V) of each step
    texts = list(prefill) or [""] * count
    attended = real[copies]
    position = attended.sum(1)  # (R,) of the next token
    rows = torch.arange(count, device=device)  # rows in the batch
    running = torch.ones(count, dtype=torch.bool, device=device)  # rows without eos
    for step in range(budget):
        logits = models[0].logits()
        support = None if guide is None else top_p_support(models[1].logits(), top_p)
        if allowed is not None:
            valid = torch.stack([allowed(texts[row]) for row in rows.tolist()]).to(device)
            support = valid if support is None else support & valid
        if support is not None:
            supports.append(support.new_ones(count, support.shape[1]).index_copy(0, rows, support))
            logits = logits.masked_fill(~support, -torch.inf)
        chosen, *scores, _ = sample_tokens(logits, temperature[rows], None if draws is None else draws[rows, step])
        alive = rows[running]
        tokens[alive, step] = chosen[running]
        logp[alive, step], entropy[alive, step] = (score[running] for score in scores)
        mask[alive, step] = True
        if allowed is not None:
            for row, token in zip(alive.tolist(), chosen[running].tolist(), strict=True):
                texts[row] += token_text(token)
        running = running & (chosen != eos)
        left = int(running.sum())
        if left == 0 or step + 1 == budget:
            break
        if 2 * left <= len(rows):
            kept = running.nonzero().flatten()
            for one in models:
                one.cache.batch_select_indices(kept)
            rows, attended, position, chosen, running = (
                value[kept] for value in (rows, attended, position, chosen, running)
            )
        attended = torch.cat([attended, attended.new_ones(len(rows), 1)], 1)
        for one in models:
            one.step(chosen, attended, position)
        position = position + 1
    model.train(training)
    width = int(mask.any(0).sum())
    tokens, mask, logp, entropy = (value[:, :width] for value in (tokens, mask, logp, entropy))
    support = torch.stack(supports, 1)[:, :width] if supports else None
    truncated, order = ~((tokens == eos) & mask).any(1), mask.long().cumsum(1) * mask
    return Generation(tokens, mask, logp, entropy, truncated, order, support)


def completion_states(model: nn.Module, tokens: Tensor, start: Tensor, width: int, pad: int) -> Tensor | None:
    """Compute the last hidden states of the tokens after prompts, differentiable; equal prompts are processed once.

    Args:
        model: Causal language model with a plain cache.
        tokens: (N, L) conversations that begin with their first token.
        start: (N,) length of each prompt, at least 1.
        width: T, number of tokens after the prompt; tokens after the end of a row are arbitrary.
        pad: Padding token of prompts.

    Returns:
        `(N, T, D)`; None if this saves less than a third of the tokens: whole rows need no padding mask.
    """
    places = torch.arange(int(start.max()), device=tokens.device)
    prompts = tokens[:, : len(places)].masked_fill(places >= start[:, None], -1)
    _, copies = prompts.unique(dim=0, return_inverse=True)
    count, rows = int(copies.max()) + 1, torch.arange(len(tokens), device=tokens.device)
    if MIN_SAVING * (len(tokens) - count) * len(places) < len(tokens) * (len(places) + width):
        return None
    first = rows.new_zeros(count).scatter_reduce(0, copies, rows, "amin", include_self=False)
    index = places - (len(places) - start[first])[:, None]
    real = index >= 0  # padded on the left
    prompt = tokens[first].gather(1, index.clamp(min=0)).masked_fill(~real, pad)
    out = run_body(model, prompt, real, positions(real), None, caching=True)
    states = out.last_hidden_state[:, -1][copies][:, None]
    if width == 1:
        return states
    cache_of(out).batch_select_indices(copies)
    position = torch.arange(width - 1, device=tokens.device).expand(len(tokens), -1) + start[:, None]
    completion = tokens.gather(1, position.clamp(max=tokens.shape[1] - 1))
    attended = torch.cat([real[copies], torch.ones_like(completion, dtype=torch.bool)], 1)
    later = run_body(model, completion, attended, position, cache_of(out), caching=True).last_hidden_state
    return torch.cat([states, later], 1)


@torch.no_grad()
def has_plain_cache(model: nn.Module) -> bool:
    """Whether the cache consists of the keys and values of every token, through which gradients flow."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    out = run_body(model, token, None, None, None)
    return all(type(part).__name__ == "DynamicLayer" for part in getattr(cache_of(out), "layers", [None]))


def run_body(
    model: nn.Module,
    tokens: Tensor,
    attended: Tensor | None,
    position: Tensor | None,
    cache: Any,
    *,
    every_layer: bool = False,
    caching: bool | None = None,
) -> Any:
    """Run the body of the model.

    Args:
        model: Causal language model.
        tokens: (N, L) new tokens.
        attended: (N, L') bool over cache and tokens, False on padding; None: rows begin with their first token.
        position: (N, L) of the tokens; None if `attended` is None.
        cache: Keys and values of the tokens before, or None.
        every_layer: Also return the hidden states of all layers.
        caching: Return a cache; None: only without gradients.
    """
    body = body_of(model)
    known = inspect.signature(body.forward).parameters
    options: dict[str, Any] = {"cache" if "cache" in known else "past_key_values": cache}  # the name before 5.24
    if position is not None and "position_ids" in known:
        options["position_ids"] = position
    if every_layer:
        options["output_hidden_states"] = True
    attention = None if attended is None else attended.long()
    caching = not torch.is_grad_enabled() if caching is None else caching
    return body(input_ids=tokens, attention_mask=attention, use_cache=caching, **options)


def cache_of(out: Any) -> Any:
    """Return the cache in the result of `run_body`; its name depends on the version of transformers."""
    return out.cache if hasattr(out, "cache") else out.past_key_values


def positions(real: Tensor) -> Tensor:
    """Return the position of every token `(N, L)`, not counting padding."""
    return (real.long().cumsum(1) - 1).clamp(min=0)


def logits_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """Compute logits `(R, V)` in float32 from hidden states `(R, D)`."""
    head = head_of(model)
    logits = hidden.float() @ head.weight.float().T
    return logits if head.bias is None else logits + head.bias.float()


def sample_tokens(logits: Tensor, temperature: Tensor, draw: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample one token per row by inversion of the cumulative distribution.

    Args:
        logits: (R, V).
        temperature: (R,).
        draw: (R,) uniform numbers in [0, 1); None: greedy.

    Returns:
        `(R,)` tokens, their log-probabilities, the entropies, and the largest log-probabilities.
    """
    logp = (logits / temperature[:, None]).log_softmax(1)
    p = logp.exp()
    if draw is None:
        chosen = logp.argmax(1)
    else:
        cumulative = p.cumsum(1)
        level = draw[:, None].float() * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, level, right=True).squeeze(1).clamp(max=logp.shape[1] - 1)
    return chosen, logp.gather(1, chosen[:, None]).squeeze(1), -torch.special.xlogy(p, p).sum(1), logp.amax(1)
