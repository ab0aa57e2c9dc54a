"""A causal language model as a `Policy`: observations are conversations, chunks are completions, decisions are tokens.

Observations and chunks are UTF-8 bytes (`task.py`); tokenizer and chat template are part of the policy. One chunk is
one message, so horizon and observation history are 1 and the action dimension is the longest message in bytes.

A completion is truncated after `spec.action_dim` tokens and bytes. A conversation longer than the model's context
raises an error; it is never truncated silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import Bytes, Layers, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.core.decisions import Decisions
from robopolicy.device import copy_to, move
from robopolicy.errors import UserError
from robopolicy.nets.normalizer import Statistics
from robopolicy.policies.base import DecisionOutput, Info, Observation, Policy, Record, Sample
from robopolicy.policies.noise import Randomness, uniform
from robopolicy.spec import PolicySpec
from robopolicy.text.generation import Generation, generate, has_plain_cache, run_body
from robopolicy.text.model import DTYPES, add_lora, build_model, check_head, head_of, load_pretrained, small_llama
from robopolicy.text.scored_tokens import ScoredTokens, completion_states
from robopolicy.text.scoring import supported_scores, token_scores
from robopolicy.text.task import KEY, messages, pack, unpack
from robopolicy.text.tokenizers import TEMPLATES, ByteTokenizer, HubTokenizer, Tokenizer, right_padded

if TYPE_CHECKING:
    from robopolicy.text.text_env import TextEnv


@dataclass(frozen=True)
class TextConfig(Validated):
    """Settings of a text policy; by default a small byte-level transformer that needs no download."""

    pretrained: str = ""  # local folder or hub id of weights and tokenizer; empty: random weights
    width: PositiveInt = 128  # of the small model
    layers: Layers = 3  # of the small model
    heads: PositiveInt = 4  # of the small model
    context: PositiveInt = 512  # context length of the small model in tokens; longer if the task needs it
    template: str = "plain"  # plain | chat, conversion of messages to tokens
    temperature: Positive = 1.0  # of sampling; in training unless the recipe sets rollout.temperature
    lora_rank: NonNegativeInt = 0  # 0 trains all weights
    lora_alpha: Positive = 16.0  # scale of the low-rank updates times their rank
    dtype: str = "float32"  # float32 | bfloat16, of the weights
    gradient_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    architecture: dict[str, Any] = field(default_factory=dict)  # transformers config; set by `pretrained`
    tokenizer_bytes: Bytes = 0  # size of the tokenizer in the checkpoint, 0: bytes; set by `pretrained`

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, options in (("template", TEMPLATES), ("dtype", tuple(DTYPES))):
            if getattr(self, key) not in options:
                raise UserError(f"policy.{key} must be one of {', '.join(options)}, got '{getattr(self, key)}'.")
        if self.width % (2 * self.heads):
            raise UserError(f"policy.width must be a multiple of twice the {self.heads} heads, got {self.width}.")


class TextPolicy(Policy):
    """Text policy with a causal language model of transformers."""

    name = "text"
    config_class = TextConfig
    config: TextConfig
    causal: ClassVar[bool] = True  # a token is sampled from the hidden state of the previous tokens
    special_tokens: ClassVar[int] = 0  # number of additional tokens that the tokenizer lacks
    score_fields: ClassVar[tuple[str, ...]] = ("tokens", "start", "temperature")  # arguments of `score` except the mask

    def __init__(self, config: TextConfig, spec: PolicySpec) -> None:
        """Build the model; `config.pretrained` is loaded unless `config.architecture` is set by a checkpoint."""
        super().__init__()
        if set(spec.observation) != {KEY} or (spec.horizon, spec.obs_horizon) != (1, 1):
            raise UserError(
                f"Policy 'text' needs '{KEY}' as its only observation and one message per step; choose a task such as "
                "text/arithmetic and leave out chunk.horizon."
            )
        self.spec = spec
        blob = torch.zeros(config.tokenizer_bytes, dtype=torch.uint8)
        self._tokenizer: Tokenizer | None = None
        if config.pretrained and not config.architecture:
            self.model, inner, architecture = load_pretrained(config.pretrained, config.dtype)
            self._tokenizer = tokenizer = HubTokenizer(inner, config.template)
            blob = tokenizer.blob()
            config = replace(config, architecture=architecture, tokenizer_bytes=len(blob))
        else:
            size = ByteTokenizer.size + self.special_tokens
            needed = 1 + spec.observation[KEY][0] + spec.action_dim  # the longest conversation, in bytes
            context = max(config.context, needed)  # positions have no weights
            small = small_llama(config.width, config.layers, config.heads, context, size)
            self.model = build_model(config.architecture or small, config.dtype)
        self.config = config
        self.register_buffer("tokenizer_blob", blob)
        check_head(self.model)
        if config.lora_rank:
            add_lora(self.model, config.lora_rank, config.lora_alpha)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]

    @property
    def env_class(self) -> type[TextEnv]:
        """Environment class of this policy family."""
        from robopolicy.text.text_env import TextEnv  # circular

        return TextEnv

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer, read from the checkpoint on first use."""
        if self._tokenizer is None:
            blob = self.get_buffer("tokenizer_blob")
            self._tokenizer = HubTokenizer.from_blob(blob, self.config.template) if len(blob) else ByteTokenizer()
        return self._tokenizer

    @property
    def context(self) -> int:
        """Maximum number of tokens of a conversation; 2**31 for models without positions."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 2**31)

    @cached_property
    def _shares_prompts(self) -> bool:
        """Whether equal prompts can be processed once; gradient checkpointing has no cache."""
        return not self.config.gradient_checkpointing and has_plain_cache(self.model)

    @property
    def vocabulary(self) -> int:
        """Number of rows of the output layer."""
        return len(head_of(self.model).weight)

    @property
    def budget(self) -> int:
        """Maximum number of tokens of a message."""
        return self.spec.action_dim

    def prompts(self, obs: Observation) -> list[list[int]]:
        """Tokenize the conversations `{"text": (B, 1, P)}`."""
        return [self.tokenizer.prompt(messages(text)) for text in unpack(obs[KEY][:, 0])]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        generator: Randomness = None,
        *,
        budget: int | None = None,
        temperature: float | Tensor | None = None,
        deterministic: bool = False,
        guide: TextPolicy | None = None,
        top_p: float = 1.0,
        allowed: Callable[[str], Tensor] | None = None,
        prefill: Sequence[str] = (),
    ) -> Generation:
        """Complete the N prompts; equal prompts are processed once.

        Args:
            prompts: Tokens of each prompt.
            generator: Random generator.
            budget: Maximum number of tokens; None: `self.budget`.
            temperature: One temperature, or (N,); None: `config.temperature`.
            deterministic: Choose the likeliest tokens.
            guide: Policy whose nucleus of probability `top_p` contains the allowed tokens.
            top_p: Probability of the nucleus.
            allowed: Returns the tokens (V,) bool that may follow the beginning of a response.
            prefill: Given beginning of each response; empty: none.

        Raises:
            UserError: A prompt and the budget exceed the model's context.
        """
        budget = self.budget if budget is None else budget
        self.check_fits(max(map(len, prompts)), budget)
        temperatures = self.temperatures(temperature, len(prompts))
        draws = None if deterministic else uniform((len(prompts), budget), generator, self.device)
        return generate(
            self.model,
            prompts,
            draws,
            budget=budget,
            temperature=temperatures,
            eos=self.tokenizer.eos,
            pad=self.tokenizer.pad,
            guide=None if guide is None else guide.model,
            top_p=top_p,
            allowed=allowed,
            token_text=lambda token: self.tokenizer.decode([token]),
            prefill=prefill,
        )

    def check_fits(self, prompt: int, budget: int, what: str = "A conversation") -> None:
        """Raise a UserError if `prompt` tokens and a message of `budget` tokens exceed the model's context."""
        if prompt + budget > self.context:
            raise UserError(
                f"{what} has {prompt} tokens, which with a message of {budget} exceed the model's context of "
                f"{self.context}; shorten prompts or messages, or set policy.context."
            )

    def temperatures(self, temperature: float | Tensor | None, count: int) -> Tensor:
        """Expand a temperature to `(count,)`; None: `config.temperature`."""
        value = self.config.temperature if temperature is None else temperature
        if isinstance(value, Tensor):
            return copy_to(value, self.device)
        return torch.full((count,), value, device=self.device)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Generate messages `(B, 1, A)` in bytes."""
        return self._chunk(self.generate(self.prompts(obs), generator, deterministic=deterministic))

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Generate messages with a record of their tokens."""
        prompts = self.prompts(obs)
        made = self.generate(prompts, generator)
        record = {**self.pad_rows(prompts, made.completions()), "temperature": self.temperatures(None, len(prompts))}
        return Sample(self._chunk(made), record, made.logp)

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Score recorded tokens."""
        return self.score(record["tokens"], record["start"], record["mask"], record["temperature"])

    def pad_rows(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> Record:
        """Return `tokens` (N, L) of prompts and completions, `start` (N,) of the completions and `mask` (N, T)."""
        whole = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        tokens, _ = right_padded(whole, self.tokenizer.pad)
        _, mask = right_padded(completions, self.tokenizer.pad)
        start = torch.tensor([len(prompt) for prompt in prompts])
        return move({"tokens": tokens, "start": start, "mask": mask}, self.device)

    def encode_message(self, text: str) -> list[int]:
        """Tokenize a message and append `eos`."""
        return [*self.tokenizer.encode(text), self.tokenizer.eos]

    def messages(self, chunk: Tensor) -> list[list[int]]:
        """Tokenize the messages `(B, 1, A)`."""
        return [self.encode_message(text) for text in unpack(chunk[:, 0])]

    def decode_message(self, tokens: Sequence[int]) -> str:
        """Decode a message, which ends at its first `eos`."""
        eos = self.tokenizer.eos
        return self.tokenizer.decode(tokens[: tokens.index(eos)] if eos in tokens else tokens)

    def generation_order(self, count: int, generator: Randomness = None) -> list[int]:
        """Return generation steps for the tokens of a message that the policy did not generate."""
        return list(range(1, count + 1))

    def conversations(self, batch: Sequence[Sequence[str]], generator: Randomness = None) -> tuple[Record, Tensor]:
        """Tokenize solved conversations: user and assistant messages alternate, the last is the assistant's.

        Returns:
            The record of `pad_rows`, and the turn `(N, T)` of each token; an observation belongs to the next turn.
        """
        prompts = [self.tokenizer.prompt(texts[:1]) for texts in batch]
        replies = [self._message_tokens(texts) for texts in batch]
        record = self.pad_rows(prompts, [[token for message in row for token in message] for row in replies])
        self._check_size(record["tokens"].shape[1], "A conversation")
        numbers = [[number for number, message in enumerate(row) for _ in message] for row in replies]
        number = copy_to(right_padded(numbers, -1)[0], self.device)  # of the message after the prompt, -1 for padding
        return {**record, "mask": record["mask"] & (number % 2 == 0)}, (number + 1) // 2

    def check_conversation_fits(self, texts: Sequence[str], what: str) -> None:
        """Raise a UserError if a conversation of a file, named by `what`, exceeds the model's context."""
        self._check_size(len(self.tokenizer.prompt(texts[:1])) + sum(map(len, self._message_tokens(texts))), what)

    def _check_size(self, tokens: int, what: str) -> None:
        if tokens > self.context:
            raise UserError(
                f"{what} has {tokens} tokens, more than the model's context of {self.context}; shorten it, or set "
                "policy.context."
            )

    def _message_tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize every message after the prompt."""
        return [self.tokenizer.reply(text) if n % 2 else self.encode_message(text) for n, text in enumerate(texts[1:])]

    def score(
        self,
        tokens: Tensor,
        start: Tensor,
        mask: Tensor,
        temperature: Tensor,
        *,
        support: Tensor | None = None,
        layer: int | None = None,
    ) -> DecisionOutput:
        """Compute log-probabilities and entropies under the current parameters, with logits in blocks.

        Args:
            tokens: (N, L) int64 conversations, arbitrary after their end.
            start: (N,) int64 index of the first decision, at least 1.
            mask: (N, T) bool, tokens from `start` on that the policy sampled.
            temperature: (N,) sampling temperatures.
            support: (N, T, V) bool, allowed tokens; None: all.
            layer: Hidden layer that the output layer is applied to; None: the last.

        Returns:
            `(N, T)` each, 0 outside the mask.
        """
        places = self.locate(tokens, start, mask, share=layer is None)
        return self.score_states(self.states(places, layer), places, temperature, support)

    def locate(self, tokens: Tensor, start: Tensor, mask: Tensor, *, share: bool = True) -> ScoredTokens:
        """Find the decisions of conversations, see `score`; `share` allows processing common prompts once."""
        pad = self.tokenizer.pad if share and self._shares_prompts else None
        return ScoredTokens.find(tokens, start, mask, pad, self.device)

    def states(self, places: ScoredTokens, layer: int | None = None) -> Tensor:
        """Compute the hidden states `(M, D)` of the tokens before the M decisions, from which these were sampled."""
        if places.shared is not None:
            return completion_states(self.model, places.shared)[places.row, places.step]
        return self.hidden(places.tokens[:, :-1], layer)[places.row, places.place - 1]

    def score_states(
        self, states: Tensor, places: ScoredTokens, temperature: Tensor, support: Tensor | None = None
    ) -> DecisionOutput:
        """Compute `score` from the hidden states `(M, D)` of `states`."""
        row, head, chosen = places.row, head_of(self.model), places.tokens[places.row, places.place]
        if support is None:
            logp, entropy = token_scores(states, head.weight, head.bias, chosen, temperature[row])
        else:
            logits = nn.functional.linear(states, head.weight, head.bias).float() / temperature[row, None]
            logp, entropy = supported_scores(logits, support[row, places.step], chosen)
        return DecisionOutput(places.spread(logp), places.spread(entropy))

    def hidden(self, tokens: Tensor, layer: int | None = None) -> Tensor:
        """Compute the hidden states `(N, L, D)` of rows that begin with their first token.

        `layer` selects the states after that many layers, or the second-to-last if the model has fewer; None: the last.
        """
        out = run_body(self.model, tokens, None, None, None, every_layer=layer is not None)
        if layer is None:
            return out.last_hidden_state
        layers = out.hidden_states
        return layers[layer if layer < len(layers) else len(layers) - 2]

    def attach_likelihood(self, rows: Decisions, generator: Randomness = None) -> Decisions:
        """Add the likelihood that recipes use; a causal model uses the log-probabilities of the tokens."""
        return rows

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Compute the mean negative log-likelihood `(B,)` of the tokens of each message, `eos` included [nats]."""
        loss, info = self.sft_loss(self.prompts(obs), self.messages(chunk), generator)
        return (loss if weight is None else loss * weight), info

    def sft_loss(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], generator: Randomness = None
    ) -> tuple[Tensor, Info]:
        """Compute the mean negative log-likelihood `(B,)` of the tokens of each completion [nats]."""
        record = self.pad_rows(prompts, completions)
        mask = record["mask"]
        out = self.score(record["tokens"], record["start"], mask, torch.ones(len(mask), device=self.device))
        count = mask.sum(1).clamp(min=1)
        loss = -out.logp.sum(1) / count
        return loss, {"nll": loss.detach(), "entropy": out.entropy.detach().sum(1) / count}

    def conversation_loss(self, batch: Sequence[Sequence[str]], generator: Randomness = None) -> tuple[Tensor, Tensor]:
        """Compute the mean negative log-likelihood and entropy of the assistant's tokens in conversations [nats]."""
        record, _ = self.conversations(batch)
        count = record["mask"].sum()
        out = self.score(record["tokens"], record["start"], record["mask"], self.temperatures(1.0, len(batch)))
        return -out.logp.sum() / count, out.entropy.sum() / count

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Do nothing: the tokenizer converts between text and tokens."""

    def trainable(self) -> list[nn.Parameter]:
        """Return all parameters, or only the low-rank updates."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    @property
    def nfe(self) -> int:
        """Maximum number of forward passes: one per token of a message."""
        return self.budget

    def _chunk(self, made: Generation) -> Tensor:
        texts = [self.decode_message(row) for row in made.completions()]
        return pack(texts, self.spec.action_dim)[:, None].to(self.device)
