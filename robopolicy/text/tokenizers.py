"""Tokenizers: bytes, which need no download, or the tokenizer of a pretrained model; both tokenize conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.optional import require

TEMPLATES = ("plain", "chat")


class Tokenizer(Protocol):
    """What the policy needs of a tokenizer."""

    size: int  # number of ids
    pad: int  # fills rows up; masked wherever it stands
    eos: int  # ends a completion

    def prompt(self, messages: Sequence[str]) -> list[int]:
        """Tokens of a conversation, messages of user and policy in turn, up to where the policy begins to write."""
        ...

    def reply(self, message: str) -> list[int]:
        """Tokens that go between a completion, its `eos` included, and the next one: the observation."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a completion, without `eos`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a completion; special tokens leave no trace."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8, and three special ones. Messages follow each other without marks."""

    size, pad, bos, eos = 259, 256, 257, 258

    def prompt(self, messages: Sequence[str]) -> list[int]:
        """`bos`, then the messages; those of the policy end with `eos`."""
        tokens = [self.bos]
        for place, message in enumerate(messages):
            tokens += self.encode(message) + ([self.eos] if place % 2 else [])
        return tokens

    def reply(self, message: str) -> list[int]:
        """Tokens of the message."""
        return self.encode(message)

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Broken UTF-8 is left out."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="ignore")


class HubTokenizer:
    """The fast tokenizer of a pretrained model."""

    def __init__(self, inner: Any, template: str) -> None:
        """Wrap a `transformers` tokenizer.

        Raises:
            UserError: It cannot be saved, has no end token, or lacks the requested chat template.
        """
        if not getattr(inner, "is_fast", False):
            raise UserError("The tokenizer of this model has no fast version, which checkpoints need; use another one.")
        if inner.eos_token_id is None:
            raise UserError("The tokenizer of this model has no end-of-sequence token; set eos_token in its folder.")
        if template == "chat" and not inner.chat_template:
            raise UserError("This model has no chat template; set policy.template=plain.")
        self.inner, self.template = inner, template
        self.size, self.eos = len(inner), int(inner.eos_token_id)
        self.pad = self.eos if inner.pad_token_id is None else int(inner.pad_token_id)

    def prompt(self, messages: Sequence[str]) -> list[int]:
        """By the chat template, or the plain messages behind `bos`, or behind `eos` where the model has no `bos`."""
        if self.template == "chat":
            return self._chat(messages)
        tokens = [self.eos if self.inner.bos_token_id is None else int(self.inner.bos_token_id)]
        for place, message in enumerate(messages):
            tokens += self.encode(message) + ([self.eos] if place % 2 else [])
        return tokens

    def reply(self, message: str) -> list[int]:
        """What the chat template puts after a completion, or the plain message."""
        if self.template != "chat":
            return self.encode(message)
        # The template of a conversation whose completion is one mark; what follows the mark is what goes between.
        mark = "\x1f"
        tokens = self._chat(["", mark, message])
        place = len(tokens) - 1 - tokens[::-1].index(self.inner.encode(mark, add_special_tokens=False)[-1])
        after = tokens[place + 1 :]
        return after[1:] if after[:1] == [self.eos] else after

    def encode(self, text: str) -> list[int]:
        """Without special tokens."""
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens are left out."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def _chat(self, messages: Sequence[str]) -> list[int]:
        roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        text = self.inner.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)
        return list(self.inner.encode(text, add_special_tokens=False))

    def blob(self) -> Tensor:
        """Serialized tokenizer as uint8, stored in `model.safetensors` with the weights."""
        special = {key: str(value) for key, value in self.inner.special_tokens_map.items() if isinstance(value, str)}
        parts = {
            "tokenizer": self.inner.backend_tokenizer.to_str(),
            "special": special,
            "chat": self.inner.chat_template,
        }
        return torch.frombuffer(bytearray(json.dumps(parts).encode("utf-8")), dtype=torch.uint8).clone()

    @classmethod
    def from_blob(cls, blob: Tensor, template: str) -> HubTokenizer:
        """Inverse of `blob`.

        Raises:
            UserError: It is damaged.
        """
        backend, fast = require("tokenizers", "text"), require("transformers", "text").PreTrainedTokenizerFast
        try:
            parts = json.loads(bytes(blob.cpu().tolist()).decode("utf-8"))
            inner = fast(tokenizer_object=backend.Tokenizer.from_str(parts["tokenizer"]), **parts["special"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"The tokenizer of this checkpoint is damaged ({error}); copy it again.") from error
        inner.chat_template = parts["chat"]
        return cls(inner, template)


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Rows of tokens as `(N, P)` int64 that end together, and `(N, P)` bool where they are."""
    width = max((len(row) for row in rows), default=0)
    tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, row in enumerate(rows):
        if row:
            tokens[place, width - len(row) :] = torch.tensor(row)
            real[place, width - len(row) :] = True
    return tokens, real


def right_padded(rows: Sequence[Sequence[int]], pad: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of tokens as `(N, T)` int64 that begin together, and `(N, T)` bool where they are."""
    tokens, real = left_padded([row[::-1] for row in rows], pad)
    tokens, real = tokens.flip(1), real.flip(1)
    extra = 0 if width is None else width - tokens.shape[1]
    if extra > 0:
        tokens = torch.cat([tokens, tokens.new_full((len(rows), extra), pad)], 1)
        real = torch.cat([real, real.new_zeros(len(rows), extra)], 1)
    return tokens, real
