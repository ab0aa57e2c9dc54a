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

from robopolicy.device import move
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


READ_EVERY = 8  # tokens between two looks at which rows have ended, on a device


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

    def to_cpu(self) -> Generation:
        """Copy the result to the CPU, with one wait if every token was allowed."""
        columns = self.tokens, self.mask, self.logp, self.entropy, self.order
        flags = self.truncated[:, None].expand_as(self.mask)
        tokens, mask, logp, entropy, order, flags = torch.stack([part.double() for part in (*columns, flags)]).cpu()
        support = None if self.support is None else self.support.cpu()
        parts = tokens.long(), mask.bool(), logp.float(), entropy.float(), flags[:, 0].bool(), order.long()
        return Generation(*parts, support)

    def completions(self) -> list[list[int]]:
        """Return the tokens of each row, `eos` included."""
        return [row[real].tolist() for row, real in zip(self.tokens.cpu(), self.mask.cpu(), strict=True)]


@dataclass
class _IncrementalModel:
    """A model with the cache of a batch."""

    model: nn.Module
    hidden: Tensor  # (R, D) after the last token
    cache: Any
    whole: bool  # whether the cache is plain

    @classmethod
    def read_prompts(cls, model: nn.Module, prompt: Tensor, real: Tensor, copies: Tensor) -> _IncrementalModel:
        """Process the prompts and copy their cache."""
        out = run_body(model, prompt, real, positions(real), None)
        cache_of(out).batch_select_indices(copies)
        return cls(model, out.last_hidden_state[:, -1][copies], cache_of(out), is_plain(cache_of(out)))

    def step(self, chosen: Tensor, attended: Tensor, position: Tensor) -> None:
        """Process the next token `(R,)` of each row."""
        out = run_body(self.model, chosen[:, None], attended, position[:, None], self.cache, whole=self.whole)
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
    copies = torch.tensor([places.setdefault(tuple(prompt), len(places)) for prompt in prompts])
    copies, prompt, real = move((copies, *left_padded(list(places), pad)), device)
    temperature, draws = move((temperature, draws), device)
    # Whether rows have ended is read after every token, on a device after several, where it would wait each time.
    interval = 1 if device.type == "cpu" or allowed is not None else READ_EVERY
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
        for column, value in zip((tokens, logp, entropy), (chosen, *scores), strict=True):
            column[rows, step] = torch.where(running, value, column[rows, step])
        mask[rows, step] = running
        if allowed is not None:
            for row, token, alive in zip(rows.tolist(), chosen.tolist(), running.tolist(), strict=True):
                texts[row] += token_text(token) if alive else ""
        running = running & (chosen != eos)
        if step + 1 == budget:
            break
        if (step + 1) % interval == 0:
            left = int(running.sum())
            if left == 0:
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


@torch.no_grad()
def has_plain_cache(model: nn.Module) -> bool:
    """Whether the cache consists of the keys and values of every token, through which gradients flow."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    return is_plain(cache_of(run_body(model, token, None, None, None)))


def is_plain(cache: Any) -> bool:
    """Whether a cache consists of the keys and values of every token, in every layer."""
    return all(type(part).__name__ == "DynamicLayer" for part in getattr(cache, "layers", [None]))


def run_body(
    model: nn.Module,
    tokens: Tensor,
    attended: Tensor | None,
    position: Tensor | None,
    cache: Any,
    *,
    every_layer: bool = False,
    caching: bool | None = None,
    whole: bool = False,
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
        whole: Every layer attends to all earlier tokens.
    """
    body = body_of(model)
    known = inspect.signature(body.forward).parameters
    options: dict[str, Any] = {"cache" if "cache" in known else "past_key_values": cache}  # the name before 5.24
    if position is not None and "position_ids" in known:
        options["position_ids"] = position
    if every_layer:
        options["output_hidden_states"] = True
    attention = None if attended is None else attended.long()
    if attended is not None and whole and tokens.device.type != "cpu" and _takes_masks(body):
        # Transformers would read the mask of padding to skip an empty one, and wait for the device in every call.
        size, past = tokens.shape[1], attended.shape[1] - tokens.shape[1]
        attention = attended[:, None, None] & attended.new_ones(size, past + size).tril(past)
    caching = not torch.is_grad_enabled() if caching is None else caching
    return body(input_ids=tokens, attention_mask=attention, use_cache=caching, **options)


def _takes_masks(body: nn.Module) -> bool:
    """Whether the attention of a model accepts masks `(N, 1, L, L')` of all pairs of tokens."""
    return getattr(body.config, "_attn_implementation", None) == "sdpa"


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
