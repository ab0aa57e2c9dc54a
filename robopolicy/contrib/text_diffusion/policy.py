"""Masked diffusion over tokens as a text policy: a message is a canvas of masks that is filled in a few steps.

A message has `budget` tokens; tokens after its first `eos` are `eos` and ignored. The network attends to the whole
conversation up to the end of the canvas, in both directions. There are two kinds of decisions:

    chain   every token is a decision: log p(token | tokens of earlier steps)
    elbo    every decision is a sample of the bound of the log-likelihood (LLaDA, Nie et al. 2025): l of the L tokens of
            one message are masked, l uniform in 1..L; `weight * sum log p(masked | rest)`, weight = messages * L / l.
            Its expectation is at most log p(messages). For recipes such as `bgpo`.

With `order=random`, positions are drawn independently of the network, and the chain is the exact distribution of the
message. With `order=confident`, the most confident positions are filled first; this choice has no gradient.
`record["order"]` is 1 + the step in which the token was filled, 0 for tokens that the policy did not generate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import PositiveInt
from robopolicy.core.decisions import PER_ROW, Decisions
from robopolicy.errors import UserError
from robopolicy.policies.base import DecisionOutput, Info, Observation, Record, Sample
from robopolicy.policies.noise import Randomness, uniform
from robopolicy.text.generation import Generation, logits_of, sample_tokens
from robopolicy.text.model import body_of, head_of
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.scoring import token_scores

if TYPE_CHECKING:
    from robopolicy.contrib.text_diffusion.text_env import DiffusionTextEnv

ORDERS = ("random", "confident")
LIKELIHOODS = ("chain", "elbo")


@dataclass(frozen=True)
class DiffusionTextConfig(TextConfig):
    """Settings of a masked-diffusion text policy, trained from scratch."""

    steps: PositiveInt = 8  # steps per message; with at least as many steps as tokens, one token per step
    order: str = "random"  # random | confident, which tokens of a message are filled first
    likelihood: str = "chain"  # chain | elbo, kind of decisions
    samples: PositiveInt = 4  # samples of the bound per conversation

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, options in (("order", ORDERS), ("likelihood", LIKELIHOODS)):
            if getattr(self, key) not in options:
                raise UserError(f"policy.{key} must be one of {', '.join(options)}, got '{getattr(self, key)}'.")
        if self.pretrained or self.lora_rank:
            raise UserError("Policy 'text_diffusion' is trained from scratch; pretrained models need policy=text.")


class DiffusionTextPolicy(TextPolicy):
    """Text policy with masked diffusion."""

    name = "text_diffusion"
    config_class = DiffusionTextConfig
    config: DiffusionTextConfig
    causal: ClassVar[bool] = False
    special_tokens: ClassVar[int] = 1  # the mask

    @property
    def env_class(self) -> type[DiffusionTextEnv]:
        """Environment class with the capability to fill gaps."""
        from robopolicy.contrib.text_diffusion.text_env import DiffusionTextEnv  # circular

        return DiffusionTextEnv

    @property
    def score_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        """Arguments of `score` except the mask."""
        drawn = ("masked",) if self.config.likelihood == "elbo" else ()
        return (*super().score_fields, "order", *drawn)

    @property
    def blank(self) -> int:
        """Mask token."""
        return self.tokenizer.size

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        generator: Randomness = None,
        *,
        budget: int | None = None,
        temperature: float | Tensor | None = None,
        deterministic: bool = False,
        given: Sequence[Mapping[int, int]] | None = None,
    ) -> Generation:
        """Fill a canvas after each of the N prompts.

        Args:
            prompts: Tokens of each prompt.
            generator: Random generator of order and tokens.
            budget: Tokens of a canvas; None: `self.budget`.
            temperature: One temperature, or (N,); None: `config.temperature`.
            deterministic: Fill the most confident positions first, with their likeliest tokens.
            given: Fixed tokens of each canvas by position; they have order 0 and log-probability 0.

        Raises:
            UserError: A prompt and the canvas exceed the model's context.
        """
        budget = self.budget if budget is None else budget
        self.check_fits(max(map(len, prompts)), budget)
        temperatures = self.temperatures(temperature, len(prompts))
        size = (len(prompts), budget, 2)
        draws = torch.zeros(size, device=self.device) if deterministic else uniform(size, generator, self.device)
        by_certainty = deterministic or self.config.order == "confident"
        tokens = torch.full((len(prompts), budget), self.blank, device=self.device)
        unfilled = torch.ones_like(tokens, dtype=torch.bool)  # still to be filled
        for row, known in enumerate(given or ()):
            for place, token in known.items():
                tokens[row, place], unfilled[row, place] = token, False
        step = self._steps_of(draws[..., 0], unfilled)
        order = torch.zeros_like(tokens)
        logp, entropy = (torch.zeros(tokens.shape, device=self.device) for _ in range(2))
        training = self.training
        self.eval()
        for now in range(self.config.steps):
            if by_certainty:
                row, place = unfilled.nonzero(as_tuple=True)
            else:
                row, place = (step == now).nonzero(as_tuple=True)
            if not len(row):
                continue
            record = self.pad_rows(prompts, tokens.tolist())
            hidden = self._encoded(record["tokens"], record["start"] + budget)[row, record["start"][row] + place]
            level = None if deterministic else draws[row, place, 1]
            chosen, *scores, confidence = sample_tokens(logits_of(self.model, hidden), temperatures[row], level)
            if by_certainty:
                taken = self._most_confident(confidence, row, place, (step == now).sum(1), tokens.shape)[row, place]
                row, place, chosen, scores = row[taken], place[taken], chosen[taken], [x[taken] for x in scores]
            tokens[row, place], order[row, place], unfilled[row, place] = chosen, now + 1, False
            logp[row, place], entropy[row, place] = scores
        self.train(training)
        mask = torch.ones_like(unfilled)
        return Generation(tokens, mask, logp, entropy, ~(tokens == self.tokenizer.eos).any(1), order)

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Generate messages with a record of their tokens and order."""
        prompts = self.prompts(obs)
        made = self.generate(prompts, generator)
        record = {**self.pad_rows(prompts, made.completions()), "temperature": self.temperatures(None, len(prompts))}
        record["order"] = made.order
        if self.config.likelihood == "chain":
            return Sample(self._chunk(made), record, made.logp)
        record["masked"] = self.masks(made.order, self.config.samples, generator)
        record["mask"] = torch.ones(record["masked"].shape[:2], dtype=torch.bool, device=self.device)
        with torch.no_grad():
            return Sample(self._chunk(made), record, self.score(**record).logp)

    def decisions(self, obs: Observation, record: Record) -> DecisionOutput:
        """Score recorded decisions."""
        return self.score(**record)

    def score(  # type: ignore[override]
        self,
        tokens: Tensor,
        start: Tensor,
        mask: Tensor,
        temperature: Tensor,
        order: Tensor,
        masked: Tensor | None = None,
    ) -> DecisionOutput:
        """Log-probabilities and entropies of recorded decisions under the current parameters.

        Args:
            tokens: (N, L) int64 conversations, any number behind their end.
            start: (N,) int64 place of the first column of `order`.
            mask: (N, T), or (N, M) with `masked`, bool, requested decisions.
            temperature: (N,) the tokens were drawn with.
            order: (N, T) int64, see above.
            masked: (N, M, T) bool, what each sample of the bound masks; None: the chain.

        Returns:
            Of the shape of `mask`, 0 where it is False; the entropy of a sample of the bound is the mean of its masks.
        """
        if masked is not None:
            return self._bound(tokens, start, mask, temperature, order, masked)
        steps = self.config.steps
        turn = self._turns(order)
        row, column = mask.nonzero(as_tuple=True)
        phase = turn * steps + order - 1  # (N, T) number of the network call
        views, view = torch.stack([row, phase[row, column]], 1).unique(dim=0, return_inverse=True)
        owner, moment = views[:, 0], views[:, 1, None]
        inside = (order[owner] > 0) & (turn[owner] == moment // steps)
        hidden = inside & (phase[owner] >= moment)
        logp, entropy = self._scored(tokens, start, temperature, owner, inside, hidden, view, column)
        blank = logp.new_zeros(mask.shape)
        return DecisionOutput(blank.masked_scatter(mask, logp), blank.masked_scatter(mask, entropy))

    def masks(self, order: Tensor, count: int, generator: Randomness = None) -> Tensor:
        """Draw `count` samples of the bound for every conversation: `(N, count, T)` bool, what they mask."""
        rows, width = order.shape
        turn, own = self._turns(order), order > 0
        draws = uniform((rows, count, width + 2), generator, order.device)
        turns = turn.amax(1) + own.any(1)  # (N,) messages of a row
        chosen = (draws[..., 0] * turns[:, None]).long()  # (N, M)
        inside = own[:, None] & (turn[:, None] == chosen[..., None])  # (N, M, T)
        size = inside.sum(2)
        number = 1 + (draws[..., 1] * size).long()
        rank = draws[..., 2:].masked_fill(~inside, 2.0).argsort(2).argsort(2)
        return inside & (rank < number[..., None])

    @torch.no_grad()
    def attach_likelihood(self, rows: Decisions, generator: Randomness = None) -> Decisions:
        """With `likelihood=elbo` one column per sample of the bound, scored now; the reward sits on the last one."""
        if self.config.likelihood == "chain":
            return rows
        masked = self.masks(rows.extra["order"], self.config.samples, generator)
        mask = rows.valid().any(1, keepdim=True).expand(-1, masked.shape[1])
        extra = {name: value for name, value in rows.extra.items() if name != "chosen"} | {"masked": masked}
        place = {name: extra[name].to(self.device) for name in self.score_fields}
        logp = self.score(mask=mask.to(self.device), **place).logp.to(mask.device)
        reward = torch.zeros_like(logp)
        reward[:, -1] = rows.require("reward").sum(1)
        ids = {name: getattr(rows, name) for name in PER_ROW}
        return Decisions(logp, logp_behaviour=logp, mask=mask, reward=reward, **ids, extra=extra)

    def conversations(self, batch: Sequence[Sequence[str]], generator: Randomness = None) -> tuple[Record, Tensor]:
        """Tokenize solved conversations like the base class, with a random order."""
        record, turns = super().conversations(batch)
        mask = record["mask"]
        draws = uniform(mask.shape, generator, self.device)
        order = torch.zeros_like(mask, dtype=torch.int64)
        turn = self._turns(mask.long())
        for number in range(int(turn.max()) + 1):
            inside = mask & (turn == number)
            order += torch.where(inside, self._steps_of(draws, inside) + 1, 0)
        return {**record, "order": order}, turns

    def check_conversation_fits(self, texts: Sequence[str], what: str) -> None:
        """Check the size of a conversation and of each message, which must fit into a canvas."""
        for message in texts[1::2]:
            size = len(self.tokenizer.encode(message))
            if size > self.budget:
                raise UserError(f"{what} has a message of {size} tokens, but a canvas has {self.budget}; shorten it.")
        super().check_conversation_fits(texts, what)

    def conversation_loss(self, batch: Sequence[Sequence[str]], generator: Randomness = None) -> tuple[Tensor, Tensor]:
        """Compute a bound of the mean negative log-likelihood per token [nats], and the mean entropy of masks."""
        record, _ = self.conversations(batch, generator)
        mask, masked = record.pop("mask"), self.masks(record["order"], 1, generator)
        requests, temperatures = (
            torch.ones(masked.shape[:2], dtype=torch.bool, device=self.device),
            self.temperatures(1.0, len(mask)),
        )
        out = self.score(**record, mask=requests, temperature=temperatures, masked=masked)
        return -out.logp.sum() / mask.sum(), out.entropy.mean()

    def sft_loss(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], generator: Randomness = None
    ) -> tuple[Tensor, Info]:
        """Sample the bound of the mean negative log-likelihood `(B,)` per token of each canvas [nats]."""
        record = self.pad_rows(prompts, completions)
        order = record.pop("mask").long()
        masked = self.masks(order, 1, generator)
        requests, temperatures = (
            torch.ones(masked.shape[:2], dtype=torch.bool, device=self.device),
            self.temperatures(1.0, len(order)),
        )
        out = self.score(**record, mask=requests, temperature=temperatures, order=order, masked=masked)
        loss = -out.logp[:, 0] / order.sum(1)
        return loss, {"nll": loss.detach(), "entropy": out.entropy[:, 0].detach()}

    def hidden(self, tokens: Tensor) -> Tensor:
        """Compute the last hidden states `(N, L, D)` of complete rows."""
        return self._encoded(tokens, torch.full((len(tokens),), tokens.shape[1], device=tokens.device))

    def encode_message(self, text: str) -> list[int]:
        """Tokenize a message as a complete canvas."""
        tokens = self.tokenizer.encode(text)[: self.budget]
        return tokens + [self.tokenizer.eos] * (self.budget - len(tokens))

    def generation_order(self, count: int, generator: Randomness = None) -> list[int]:
        """Draw generation steps for the tokens of a message that the policy did not generate."""
        draws = uniform((1, count), generator, self.device)
        return (self._steps_of(draws, torch.ones_like(draws, dtype=torch.bool))[0] + 1).tolist()

    @property
    def nfe(self) -> int:
        """Number of forward passes: one per step."""
        return self.config.steps

    def _steps_of(self, draws: Tensor, unfilled: Tensor) -> Tensor:
        """Assign positions to steps `(N, L)` evenly, in the order of their draws; -1 for filled positions."""
        rank = draws.masked_fill(~unfilled, 2.0).argsort(1).argsort(1)
        return torch.where(unfilled, rank * self.config.steps // unfilled.sum(1, keepdim=True).clamp(min=1), -1)

    def _most_confident(
        self, confidence: Tensor, row: Tensor, place: Tensor, count: Tensor, shape: torch.Size
    ) -> Tensor:
        """Select the `count` (N,) most confident open positions, `(N, L)` bool."""
        level = confidence.new_full(shape, -torch.inf)
        level[row, place] = confidence
        rank = (-level).argsort(dim=1, stable=True).argsort(1)
        return rank < count[:, None]

    def _turns(self, order: Tensor) -> Tensor:
        """Return the message index `(N, T)` of each column; messages have `budget` tokens."""
        return ((order > 0).long().cumsum(1) - 1).clamp(min=0) // self.budget

    def _bound(
        self, tokens: Tensor, start: Tensor, mask: Tensor, temperature: Tensor, order: Tensor, masked: Tensor
    ) -> DecisionOutput:
        owner, sample = mask.nonzero(as_tuple=True)
        hidden = masked[owner, sample]  # (V, T)
        turn = self._turns(order)
        own = turn.masked_fill(order == 0, -1)
        inside = own[owner] == turn[owner].masked_fill(~hidden, -1).amax(1, keepdim=True)
        view, column = hidden.nonzero(as_tuple=True)
        logp, entropy = self._scored(tokens, start, temperature, owner, inside, hidden, view, column)
        number = hidden.sum(1).clamp(min=1)
        weight = (own.amax(1) + 1)[owner] * inside.sum(1) / number
        total, mean = (logp.new_zeros(len(owner)).index_add(0, view, value) for value in (logp, entropy))
        blank = logp.new_zeros(mask.shape)
        return DecisionOutput(blank.masked_scatter(mask, weight * total), blank.masked_scatter(mask, mean / number))

    def _scored(
        self,
        tokens: Tensor,
        start: Tensor,
        temperature: Tensor,
        owner: Tensor,
        inside: Tensor,
        hidden: Tensor,
        view: Tensor,
        column: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Score `(M,)` tokens at `column` of `view`: V rows `owner` with `hidden` (V, T) masked, up to `inside`."""
        columns = torch.arange(hidden.shape[1], device=tokens.device)
        end = start[owner] + 1 + torch.where(inside, columns, 0).amax(1)
        seen = tokens[owner]  # a copy
        place, behind = hidden.nonzero(as_tuple=True)
        seen[place, start[owner][place] + behind] = self.blank
        at = start[owner][view] + column
        states = self._encoded(seen, end)[view, at]
        head = head_of(self.model)
        return token_scores(states, head.weight, head.bias, tokens[owner[view], at], temperature[owner][view])

    def _encoded(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Compute the last hidden states `(V, L, D)` of rows whose first `length` (V,) tokens attend to each other."""
        width = int(length.max())
        real = torch.arange(width, device=tokens.device) < length[:, None]
        dtype = head_of(self.model).weight.dtype
        bias = torch.zeros(real.shape, dtype=dtype, device=tokens.device).masked_fill(~real, torch.finfo(dtype).min)
        attention = bias[:, None, None].expand(-1, 1, width, -1)
        inputs = tokens[:, :width].masked_fill(~real, self.tokenizer.pad)
        return body_of(self.model)(input_ids=inputs, attention_mask=attention, use_cache=False).last_hidden_state
