"""Learning text: imitation of solutions, and every recipe of the catalogue on what the policy writes.

`text_sft` is behaviour cloning of messages. `text_recipe` hands the attempts of the sampling side to a `Recipe`
(`configs/text`): select, compare, and per epoch and minibatch score, loss and step; all of it is the core that robots
use. A policy that is fresh may first imitate the task's own solutions (`imitation`), as nothing can be compared where
nobody ever succeeds. Log-probabilities of the start of an update are those recorded while sampling; where an
engine of its own wrote, or in half precision, where a cache rounds otherwise than a whole pass, the rows are scored
again and the recorded ones become those of the behaviour.

Overflow: a message that reaches its budget is judged as it stands; `overlong=mask` leaves such rows out of loss and
statistics (overlong filtering). Rows that could not be judged are always left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import nn

from robopolicy.algorithms.frames.base import Algorithm, Metrics, Stateful, frozen_copy
from robopolicy.algorithms.recipe import whole_groups
from robopolicy.catalogue import read_recipe
from robopolicy.core.decisions import Decisions, MissingField
from robopolicy.core.recipe import Recipe
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import DecisionOutput, Info, Policy
from robopolicy.text.engines import ENGINES, OWN, corrected
from robopolicy.text.policy import TextPolicy
from robopolicy.text.summaries import summaries_of, summarised
from robopolicy.text.world import score

OVERLONG = ("score", "mask")
PLACES = ("process", "ray")  # where players are
SCORED = 1024  # rows scored at once where no gradient is needed


@dataclass(frozen=True)
class TextLearnerConfig:
    """What imitation and recipes share."""

    lr: float = 1e-3  # of AdamW, after the warm-up
    weight_decay: float = 0.0  # decoupled
    beta1: float = 0.9  # AdamW momentum
    beta2: float = 0.99  # AdamW second-moment decay
    lr_final: float | None = None  # at the last update, reached linearly; None keeps the rate
    warmup: int = 10  # updates of linear warm-up
    grad_clip: float = 1.0  # largest gradient norm


@dataclass(frozen=True)
class TextSFTConfig(TextLearnerConfig):
    """Settings of imitation."""

    batch_size: int = 64  # conversations per update
    problems: int = 0  # different ones, over and over; 0: always new ones
    data: str = ""  # JSONL or parquet file of demonstrations; empty takes the task's own solutions


@dataclass(frozen=True)
class TextRecipeConfig(TextLearnerConfig):
    """Settings of learning by a recipe."""

    lr: float = 3e-4  # of AdamW, after the warm-up
    recipe: str = "grpo"  # name in configs/text, or the path of a .yaml file
    imitation: int = 0  # first updates, which imitate the task's own solutions
    imitation_lr: float = 1e-3  # learning rate of these
    prompts: int = 16  # groups per update
    group_size: int = 0  # attempts per prompt; 0: as the recipe says
    minibatches: int = 0  # gradient steps per pass over a batch; 0: as the recipe says
    problems: int = 2000  # different prompts of training
    overlong: str = "score"  # score | mask, messages that reach their budget
    engine: str = OWN  # own | vllm, what writes the attempts
    importance_cap: float = 2.0  # largest weight for the mismatch of another engine, where the recipe names none
    staleness: int = 0  # updates that weights may be old; above 0 attempts are played while learning
    players: int = 0  # processes that play; 0: this one, on a second thread where staleness is above 0
    players_on: str = "process"  # process | ray, of this machine or of a cluster
    data: str = ""  # JSONL or parquet file, for recipes that learn from demonstrations, pairs or offline logs

    def __post_init__(self) -> None:
        if self.overlong not in OVERLONG:
            raise UserError(f"algorithm.overlong must be one of {', '.join(OVERLONG)}, got '{self.overlong}'.")
        if self.engine not in (OWN, *ENGINES):
            raise unknown_name("engine", self.engine, (OWN, *ENGINES))
        if self.players_on not in PLACES:
            raise unknown_name("place", self.players_on, PLACES, "of players")
        if self.players < 0 or (self.players and self.engine != OWN):
            raise UserError(
                f"A text recipe needs players >= 0, and none with engine={self.engine}, got {self.players}."
            )
        if self.importance_cap <= 0:
            raise UserError(f"algorithm.importance_cap must be positive, got {self.importance_cap}.")
        if (
            self.prompts < 1
            or self.problems < self.prompts
            or min(self.group_size, self.staleness, self.minibatches, self.imitation) < 0
        ):
            raise UserError(
                "A text recipe needs prompts >= 1, problems >= prompts, group_size, staleness, minibatches, imitation "
                f">= 0, got {self.prompts}, {self.problems}, {self.group_size}, {self.staleness}, {self.minibatches} "
                f"and {self.imitation}."
            )


class TextLearner(Algorithm):
    """Base of both: one AdamW on what is trainable of a text policy."""

    policy: TextPolicy
    config: Any

    def __init__(self, config: TextLearnerConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place."""
        if not isinstance(policy, TextPolicy):
            raise UserError(f"Algorithm '{self.name}' trains text; choose policy=text, not '{policy.name}'.")
        super().__init__(policy, total_updates=total_updates)
        self.config = config
        self.optimizer = torch.optim.AdamW(
            policy.trainable(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
        )

    def rate(self) -> float:
        """Learning rate of the running update."""
        config = self.config
        final = config.lr if config.lr_final is None else config.lr_final
        return ramped(config.lr, final, self.updates, self.total_updates, config.warmup)

    def imitate(self, batch: Sequence[Sequence[str]]) -> Metrics:
        """One step towards conversations: messages of the world and of the demonstrator in turn."""
        self.policy.train()
        nll, entropy = self.policy.conversation_loss(batch, self.generator)
        metrics = self.step(nll)
        self.updates += 1
        return metrics | {"actor/entropy": float(entropy.detach())}

    def step(self, loss: torch.Tensor) -> Metrics:
        """One gradient step."""
        self.optimizer.param_groups[0]["lr"] = rate = self.rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.policy.trainable(), self.config.grad_clip)
        self.optimizer.step()
        return {"actor/loss": loss.item(), "actor/grad_norm": float(norm), "actor/lr": rate}

    def parts(self) -> Mapping[str, Stateful]:
        """Network and optimiser."""
        return {"policy": self.policy, "optimizer": self.optimizer}


class TextSFT(TextLearner):
    """Imitation of solved conversations."""

    name = "text_sft"
    experience: ClassVar[str] = "text_demonstrations"
    config: TextSFTConfig

    def update(self, batch: Sequence[Sequence[str]]) -> Metrics:
        """One step."""
        return self.imitate(batch)


class TextRecipe(TextLearner):
    """Any recipe of the catalogue."""

    name = "text_recipe"
    experience: ClassVar[str] = "text_rollout"
    config: TextRecipeConfig

    def __init__(self, config: TextRecipeConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place; a recipe that compares with a reference gets a frozen copy."""
        super().__init__(config, policy, total_updates=total_updates)
        try:
            plain = read_recipe(config.recipe)
            self.recipe = Recipe.from_plain(corrected(plain, config.importance_cap) if config.engine != OWN else plain)
        except ValueError as error:
            raise UserError(f"Recipe '{config.recipe}': {error}") from error
        if config.imitation and (config.imitation >= total_updates or self.recipe.data != "rollout"):
            raise UserError(
                f"Imitation comes before updates by a recipe that learns from rollouts, but recipe '{config.recipe}' "
                f"learns from {self.recipe.data} and {config.imitation} of {total_updates} updates are to imitate."
            )
        self.summaries = summaries_of(self.recipe.plain)
        self.group_size = config.group_size or self.recipe.group_size
        self.reference: TextPolicy | None = frozen_copy(policy) if _compares(self.recipe) else None
        self.advantage: torch.Tensor | None = None  # (N, 1) or (N, T) of the last batch, 0 where not selected

    def rate(self) -> float:
        """Learning rate of the running update; the recipe's own schedule begins behind imitation."""
        config, done = self.config, self.updates - self.config.imitation
        if done < 0:
            return ramped(config.imitation_lr, config.imitation_lr, self.updates, config.imitation, config.warmup)
        final = config.lr if config.lr_final is None else config.lr_final
        return ramped(config.lr, final, done, self.total_updates - config.imitation, config.warmup)

    def update(self, batch: Decisions | Sequence[Sequence[str]]) -> Metrics:
        """Select, compare, and the recipe's epochs; a batch without a row to learn from changes nothing.

        Conversations, the batches of the first `imitation` updates, are imitated.
        """
        if not isinstance(batch, Decisions):
            return self.imitate(batch)
        if self.updates == self.config.imitation > 0:  # as a run of its own that starts from what was imitated
            self.optimizer.state.clear()
            self.reference = None if self.reference is None else frozen_copy(self.policy)
        try:
            return self._update(moved(batch, self.policy.device))
        except MissingField as error:
            if "logp_ref" in str(error) and self.reference is None and self.updates == self.config.imitation:
                self.reference = frozen_copy(self.policy)  # nothing has been learned yet
                return self.update(batch)
            raise UserError(f"Recipe '{self.config.recipe}' asks for more than text records: {error}") from error

    def _update(self, batch: Decisions) -> Metrics:
        batch = self._prepared(batch)
        self.policy.train()
        info: Info = {}
        metrics: Metrics = {"actor/informative": 0.0}
        rows = self.recipe.select(batch, self.generator)
        self.advantage = torch.zeros(len(batch), 1)
        if len(rows) and bool(batch.select(rows).valid().any()):
            decisions = batch.select(rows)
            advantage = self.recipe.advantage(decisions)
            for _ in range(self.recipe.epochs):
                for index in self._minibatches(decisions):
                    part = decisions.select(index)
                    out = score(self.policy, part)
                    loss, info = self.recipe.loss(part, advantage[index], out.logp, out.entropy)
                    metrics |= self.step(loss)
            metrics["actor/informative"] = float((advantage != 0).any(1).float().mean())
            blank = advantage.new_zeros(len(batch), advantage.shape[1])
            self.advantage = blank.index_copy_(0, rows, advantage).cpu()
        self.recipe.observe(batch, info)
        self.updates += 1
        metrics |= {f"actor/{key}": float(value) for key, value in info.items()}
        return metrics | {"actor/selected": len(rows) / len(batch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, with the reference that the first update may have asked for."""
        if "reference" in state and self.reference is None:
            self.reference = frozen_copy(self.policy)
        super().load_state_dict(state)

    def parts(self) -> Mapping[str, Stateful]:
        """Those of the base, what the recipe remembers, and the reference."""
        reference = {} if self.reference is None else {"reference": self.reference}
        return {**super().parts(), "recipe": self.recipe, **reference}

    def _minibatches(self, decisions: Decisions) -> list[torch.Tensor]:
        count = self.config.minibatches or self.recipe.minibatches
        if count == 1:
            return [torch.arange(len(decisions))]
        size = -(-len(decisions) // count)
        return list(whole_groups(decisions.need("group"), size, self.generator))

    @torch.no_grad()
    def _prepared(self, batch: Decisions) -> Decisions:
        """Without overlong rows where asked, scored again where needed, and with what the recipe reads beside."""
        mask = batch.valid()
        if self.config.overlong == "mask":
            mask = mask & ~batch.extra["cut"][:, None]
        batch = batch.with_fields(mask=mask)
        if self.policy.config.dtype != "float32" or self.config.engine != OWN:
            behaviour = batch.logp_old if batch.logp_behaviour is None else batch.logp_behaviour
            out = self._scored(self.policy, batch)
            batch = batch.with_fields(logp_old=out.logp, logp_behaviour=behaviour, entropy=out.entropy)
        elif batch.logp_behaviour is None:
            batch = batch.with_fields(logp_behaviour=batch.logp_old)
        if self.reference is not None:
            batch = batch.with_fields(logp_ref=self._scored(self.reference, batch).logp)
        return summarised(self.policy, batch, self.summaries)

    def _scored(self, policy: TextPolicy, batch: Decisions) -> DecisionOutput:
        starts = range(0, len(batch), SCORED)
        parts = [score(policy, batch.select(slice(at, at + SCORED))) for at in starts]
        return DecisionOutput(torch.cat([part.logp for part in parts]), torch.cat([part.entropy for part in parts]))


def ramped(start: float, final: float, done: int, total: int, warmup: int) -> float:
    """Learning rate after `done` of `total` updates: linear from `start` to `final`, below it while warming up."""
    rate = start + (final - start) * min(1.0, done / total)
    return rate * min(1.0, (done + 1) / (warmup + 1))


def moved(batch: Decisions, device: torch.device) -> Decisions:
    """The batch on `device`."""
    values = {entry.name: getattr(batch, entry.name) for entry in fields(Decisions) if entry.name != "extra"}
    there = {name: value.to(device) for name, value in values.items() if value is not None}
    return Decisions(**there, extra={name: value.to(device) for name, value in batch.extra.items()})


def _compares(recipe: Recipe) -> bool:
    """Whether a recipe may need log-probabilities under the reference."""
    plain = recipe.plain
    kl = (plain["estimator"] or {}).get("kl_coef", 0.0) != 0.0 or "kl" in plain["controllers"]
    offline = recipe.data in ("pairs", "offline")
    return bool(kl or offline or plain["objective"] is not None or plain["regularizers"])
