"""Places of the scored tokens in a batch of conversations, and prompts that several conversations share.

They are found on the CPU and copied to the device once, because they decide about the shapes of its work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robopolicy.device import move
from robopolicy.text.generation import cache_of, positions, run_body

MIN_SAVING = 3  # the saved fraction of tokens must be at least 1 / MIN_SAVING


@dataclass(frozen=True)
class SharedPrompts:
    """The different prompts of N conversations and the tokens after them, for `completion_states`."""

    prompt: Tensor  # (P, L) padded on the left
    real: Tensor  # (P, L) bool, False on padding
    copies: Tensor  # (N,) prompt of each conversation
    completion: Tensor  # (N, T - 1) tokens after the prompt
    position: Tensor  # (N, T - 1) of these tokens

    @classmethod
    def find(cls, tokens: Tensor, start: Tensor, width: int, pad: int) -> SharedPrompts | None:
        """Find the prompts on the CPU; None if processing them once saves less than a third of the tokens.

        Args:
            tokens: (N, L) conversations that begin with their first token.
            start: (N,) length of each prompt, at least 1.
            width: T, number of tokens after the prompt; tokens after the end of a row are arbitrary.
            pad: Padding token of prompts.
        """
        places = torch.arange(int(start.max()))
        prompts = tokens[:, : len(places)].masked_fill(places >= start[:, None], -1)
        _, copies = prompts.unique(dim=0, return_inverse=True)
        count, rows = int(copies.max()) + 1, torch.arange(len(tokens))
        if MIN_SAVING * (len(tokens) - count) * len(places) < len(tokens) * (len(places) + width):
            return None
        first = rows.new_zeros(count).scatter_reduce(0, copies, rows, "amin", include_self=False)
        index = places - (len(places) - start[first])[:, None]
        real = index >= 0
        prompt = tokens[first].gather(1, index.clamp(min=0)).masked_fill(~real, pad)
        position = torch.arange(width - 1).expand(len(tokens), -1) + start[:, None]
        position = position.clamp(max=tokens.shape[1] - 1)  # may exceed the context after the end of a row
        return cls(prompt, real, copies, tokens.gather(1, position), position)


@dataclass(frozen=True)
class ScoredTokens:
    """The M decisions of N conversations, on the device of the policy."""

    tokens: Tensor  # (N, L) conversations
    mask: Tensor  # (N, T) bool, tokens after the prompt that are decisions
    row: Tensor  # (M,) conversation of each decision
    step: Tensor  # (M,) its column in `mask`
    place: Tensor  # (M,) its column in `tokens`
    shared: SharedPrompts | None  # prompts that are processed once; None: every row is processed as a whole

    def spread(self, values: Tensor) -> Tensor:
        """Return `values` (M,) as `(N, T)`, 0 outside the mask."""
        return values.new_zeros(self.mask.shape).index_put((self.row, self.step), values)

    @classmethod
    def find(cls, tokens: Tensor, start: Tensor, mask: Tensor, pad: int | None, device: torch.device) -> ScoredTokens:
        """Find the decisions of conversations, whose arguments are as in `TextPolicy.score`.

        Prompts are padded with `pad`; None: every row is processed as a whole. The search is on the CPU, because it
        decides about shapes: one wait for the device.
        """
        if tokens.device.type != "cpu":
            width = tokens.shape[1]
            packed = torch.cat([tokens, start[:, None], mask.long()], 1).cpu()
            tokens, start, mask = packed[:, :width], packed[:, width], packed[:, width + 1 :].bool()
        row, step = mask.nonzero(as_tuple=True)
        shared = None if pad is None else SharedPrompts.find(tokens, start, mask.shape[1], pad)
        return move(cls(tokens, mask, row, step, start[row] + step, shared), device)


def completion_states(model: nn.Module, shared: SharedPrompts) -> Tensor:
    """Compute the last hidden states `(N, T, D)` of the tokens after prompts, differentiable.

    Every prompt is processed once; the model must have a plain cache.
    """
    real, copies = shared.real, shared.copies
    out = run_body(model, shared.prompt, real, positions(real), None, caching=True, whole=True)
    states = out.last_hidden_state[:, -1][copies][:, None]
    if not shared.completion.shape[1]:
        return states
    cache_of(out).batch_select_indices(copies)
    attended = torch.cat([real[copies], torch.ones_like(shared.completion, dtype=torch.bool)], 1)
    later = run_body(
        model, shared.completion, attended, shared.position, cache_of(out), caching=True, whole=True
    ).last_hidden_state
    return torch.cat([states, later], 1)
