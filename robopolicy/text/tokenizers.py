"""Tokenizers of conversations: bytes, without a download, or the tokenizer of a pretrained model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.optional import require

TEMPLATES = ("plain", "chat")
PLACEHOLDER = "[completion]"  # stands for a completion in a chat; the text after it begins the next turn


class Tokenizer(Protocol):
    """Interface of the tokenizers of text policies."""

    size: int  # number of ids
    pad: int  # padding, always masked
    eos: int  # end of a completion

    def prompt(self, messages: Sequence[str]) -> list[int]:
        """Tokenize alternating messages of user and policy, up to the start of the next completion."""
        ...

    def reply(self, message: str) -> list[int]:
        """Tokenize an observation: the tokens between the `eos` of a completion and the next completion."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenize a completion, without `eos`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode a completion; special tokens are dropped."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8, and three special tokens. There are no separators between messages."""

    size, pad, bos, eos = 259, 256, 257, 258

    def prompt(self, messages: Sequence[str]) -> list[int]:
        """Return `bos` and the messages; messages of the policy end with `eos`."""
        return [self.bos, *_plain(self, messages)]

    def reply(self, message: str) -> list[int]:
        """Tokenize the message."""
        return self.encode(message)

    def encode(self, text: str) -> list[int]:
        """Return the bytes of the text."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode bytes; invalid UTF-8 is dropped."""
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
        """Apply the chat template, or return `bos` (`eos` if the model has no `bos`) and the plain messages."""
        if self.template == "chat":
            return self.encode(self._rendered(messages))
        return [self.eos if self.inner.bos_token_id is None else int(self.inner.bos_token_id), *_plain(self, messages)]

    def reply(self, message: str) -> list[int]:
        """Return the tokens that the chat template adds after a completion, or the plain message."""
        if self.template != "chat":
            return self.encode(message)
        _, found, rest = self._rendered(["", PLACEHOLDER, message]).partition(PLACEHOLDER)
        if not found:
            raise UserError(
                "The chat template of this model changes the messages of the assistant, so turns cannot follow each "
                "other; set policy.template=plain, or choose a task with one turn."
            )
        after = self.encode(rest)
        return after[1:] if after[:1] == [self.eos] else after

    def encode(self, text: str) -> list[int]:
        """Tokenize without special tokens."""
        return list(self.inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode without special tokens."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def _rendered(self, messages: Sequence[str]) -> str:
        """Apply the chat template to alternating messages of user and policy."""
        roles = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
        return str(self.inner.apply_chat_template(roles, tokenize=False, add_generation_prompt=True))

    def blob(self) -> Tensor:
        """Serialize the tokenizer as uint8, for `model.safetensors`."""
        special = {key: str(value) for key, value in self.inner.special_tokens_map.items() if isinstance(value, str)}
        backend = self.inner.backend_tokenizer.to_str()
        parts = {"tokenizer": backend, "special": special, "chat": self.inner.chat_template}
        return torch.frombuffer(bytearray(json.dumps(parts).encode("utf-8")), dtype=torch.uint8).clone()

    @classmethod
    def from_blob(cls, blob: Tensor, template: str) -> HubTokenizer:
        """Restore a tokenizer from `blob`.

        Raises:
            UserError: The data is damaged.
        """
        backend, fast = require("tokenizers", "text"), require("transformers", "text").PreTrainedTokenizerFast
        try:
            parts = json.loads(bytes(blob.cpu().tolist()).decode("utf-8"))
            inner = fast(tokenizer_object=backend.Tokenizer.from_str(parts["tokenizer"]), **parts["special"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"The tokenizer of this checkpoint is damaged ({error}); copy it again.") from error
        inner.chat_template = parts["chat"]
        return cls(inner, template)


def same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether both tokenizers have the same ids for the same text, and the same `eos`."""

    def ids(tokenizer: Tokenizer) -> tuple[Any, ...]:
        vocabulary = tokenizer.inner.get_vocab() if isinstance(tokenizer, HubTokenizer) else tokenizer.size
        return (vocabulary, tokenizer.eos)

    return ids(first) == ids(second)


def _plain(tokenizer: Tokenizer, messages: Sequence[str]) -> list[int]:
    """Tokenize alternating messages without template; messages of the policy end with `eos`."""
    rows = [tokenizer.encode(text) + ([tokenizer.eos] if n % 2 else []) for n, text in enumerate(messages)]
    return [token for row in rows for token in row]


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Stack rows of tokens as `(N, P)` int64 with padding on the left, and return the mask of the tokens."""
    width = max((len(row) for row in rows), default=0)
    tokens = torch.full((len(rows), width), pad, dtype=torch.int64)
    real = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        if row:
            tokens[index, width - len(row) :] = torch.tensor(row)
            real[index, width - len(row) :] = True
    return tokens, real


def right_padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Stack rows of tokens as `(N, T)` int64 with padding on the right, and return the mask of the tokens."""
    tokens, real = left_padded([row[::-1] for row in rows], pad)
    return tokens.flip(1), real.flip(1)
