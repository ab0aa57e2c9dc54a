"""Training of a text policy by any text recipe.

`text_recipe` passes trajectories to a `Recipe`: selection, advantages, and per epoch and minibatch scores, loss and
step, with the same core as robot policies. An untrained policy can first be fine-tuned on the task's own solutions
(`sft.py`), since recipes need some successful rollouts. An update starts from the log-probabilities recorded during
sampling. With another engine, or in half precision, where a cache rounds differently from a full pass, the rows are
scored again and the recorded values become `logp_behaviour`. Rows that this policy did not sample (replayed rows and
rows of a teacher) keep the recorded values.

Messages that reach their budget are rewarded without further treatment; `overlong=mask` excludes their rows from loss
and statistics (overlong filtering). Rows without a valid reward are always excluded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any

import torch

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, frozen_copy, make_metrics
from robopolicy.algorithms.recipe import group_minibatches
from robopolicy.constraints import AtMost, NonNegativeInt, Positive, PositiveInt, Range
from robopolicy.core.decisions import Decisions, MissingField
from robopolicy.core.gradients import flat_gradient, group_scores, influence
from robopolicy.core.recipe import Recipe
from robopolicy.device import move
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import DecisionOutput, Info, Policy
from robopolicy.recipe_files import read_recipe
from robopolicy.text.annotators import RolloutAnnotator, requested_annotators, requested_features, with_features
from robopolicy.text.engines import ENGINES, NATIVE, with_importance_cap
from robopolicy.text.policy import TextPolicy
from robopolicy.text.rollouts.collector import OBJECTIVES
from robopolicy.text.rollouts.protocols import REPLAYED, TEACHER
from robopolicy.text.scoring_options import check_teacher, scoring_options
from robopolicy.text.sft import TextLearner, TextLearnerConfig, warmup_linear
from robopolicy.text.text_env import score
from robopolicy.text.value_head import ValueHead, score_with_value

OVERLONG = ("score", "mask")
WORKER_BACKENDS = ("process", "ray")  # of rollout workers
MAX_WORKERS = 256
NumWorkers = Annotated[int, Range(0, MAX_WORKERS)]
MAX_VOCAB = 4096  # largest vocabulary for which the support of every token is stored
SCORING_BATCH = 1024  # rows per forward pass without gradients


@dataclass(frozen=True)
class TextRecipeConfig(TextLearnerConfig):
    """Settings of training by a recipe."""

    lr: Positive = 3e-4  # of AdamW, after the warm-up
    recipe: str = "grpo"  # name of a recipe, or the path of a .yaml file
    critic_lr: Positive = 1e-3  # of the value head of recipes with a critic
    sft_updates: NonNegativeInt = 0  # initial updates of supervised fine-tuning on the task's own solutions
    sft_lr: Positive = 1e-3  # learning rate of supervised fine-tuning
    prompts_per_update: Annotated[PositiveInt, AtMost("num_prompts")] = 16  # groups per update
    group_size: NonNegativeInt = 0  # rollouts per prompt; 0: as in the recipe
    minibatches: NonNegativeInt = 0  # gradient steps per pass over a batch; 0: as in the recipe
    num_prompts: PositiveInt = 2000  # number of different training prompts; fewer if the task has fewer
    overlong: str = "score"  # score | mask, messages that reach their budget
    engine: str = NATIVE  # native | vllm, engine that generates the rollouts
    importance_cap: Positive = 2.0  # maximum weight for the mismatch of another engine, unless the recipe sets one
    staleness: NonNegativeInt | None = None  # maximum age of weights in updates, above 0: asynchronous; None: recipe
    num_workers: NumWorkers = 0  # worker processes; 0: this process, on a second thread if staleness is above 0
    worker_backend: str = "process"  # process | ray, workers on this machine or in a cluster
    teacher: str = ""  # checkpoint of the teacher, for recipes with a teacher or an averaged reference
    data: str = ""  # JSONL or parquet file, for recipes that learn from demonstrations, pairs or offline logs

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlong not in OVERLONG:
            raise UserError(f"algorithm.overlong must be one of {', '.join(OVERLONG)}, got '{self.overlong}'.")
        if self.engine not in (NATIVE, *ENGINES):
            raise unknown_name("engine", self.engine, (NATIVE, *ENGINES))
        if self.worker_backend not in WORKER_BACKENDS:
            raise unknown_name("backend", self.worker_backend, WORKER_BACKENDS, "of workers")
        if self.num_workers and self.engine != NATIVE:
            raise UserError(
                f"Rollout workers need engine={NATIVE}, got num_workers={self.num_workers} and engine={self.engine}."
            )


class TextRecipe(TextLearner):
    """Training of a text policy by any recipe."""

    name = "text_recipe"
    config_class = TextRecipeConfig
    data_source = "text_rollout"
    heads = ("text",)
    reference = "shao2024grpo"
    default_data = "its own rollouts, or, depending on the recipe,"
    config: TextRecipeConfig

    def __init__(self, config: TextRecipeConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to train `policy` in place, with a frozen copy of it as the reference of recipes that need one."""
        super().__init__(config, policy, total_updates=total_updates)
        try:
            plain = read_recipe(config.recipe)
            if config.engine != NATIVE:
                plain = with_importance_cap(plain, config.importance_cap)
            self.recipe = Recipe.from_dict(plain)
            self.options = scoring_options(self.recipe.rollout)
        except ValueError as error:
            raise UserError(f"Recipe '{config.recipe}': {error}") from error
        if config.sft_updates and self.recipe.data != "rollout":
            raise UserError(
                f"algorithm.sft_updates must be 0 with recipe '{config.recipe}', which learns from {self.recipe.data}: "
                "supervised fine-tuning precedes recipes that learn from rollouts."
            )
        if config.sft_updates >= total_updates:
            raise UserError(
                f"algorithm.sft_updates must be less than the {total_updates} updates of the run (budget.updates), got "
                f"{config.sft_updates}."
            )
        self._check_unused()
        self._check_requirements()
        self.features = requested_features(self.recipe.plain)
        self.group_size = config.group_size or self.recipe.group_size
        if self.group_size == 1 < self.recipe.group_size and _within_groups(self.recipe.plain["advantage"]):
            raise UserError(
                f"Recipe '{config.recipe}' compares the rollouts of a group; set algorithm.group_size to 2 or more, or "
                "to 0 for the group size of the recipe."
            )
        self.teacher: TextPolicy | None = None  # see `set_teacher`
        self.reference_policy: TextPolicy | None = frozen_copy(policy) if self._needs_reference() else None
        self.critic: ValueHead | None = None
        if self.recipe.critic is not None:
            self.critic = ValueHead(self.policy)
            self.optimizer.add_param_group({"params": list(self.critic.parameters()), "lr": config.critic_lr})
        for option in self.options.values():
            option.setup(self)
        self.advantage: torch.Tensor | None = None  # (N, 1) or (N, T) of the last batch, 0 if not selected
        self.influence: torch.Tensor | None = None  # (O,) of its objectives, if the rewards need it

    def _check_unused(self) -> None:
        """Reject settings that the recipe does not use."""
        config = self.config
        if config.data and self.recipe.data == "rollout":
            raise UserError(
                f"algorithm.data={config.data} is not used: recipe '{config.recipe}' learns from its own rollouts; "
                "remove it, or choose a recipe for demonstrations, pairs or offline logs, e.g. sft, dpo or kto."
            )
        if config.teacher and not self.requires_teacher:
            raise UserError(
                f"algorithm.teacher={config.teacher} is not used: recipe '{config.recipe}' has no teacher; "
                "remove it, or choose a recipe with a teacher, e.g. kdrl."
            )

    def _check_requirements(self) -> None:
        """Reject a policy, engine or workers that do not fulfil the requirements of the recipe."""
        name, config = self.config.recipe, self.config
        critic = {} if self.recipe.critic is None else {"critic": ("causal",)}
        for key, needs in (critic | {key: option.needs for key, option in self.options.items()}).items():
            if "causal" in needs and not self.policy.causal:
                raise UserError(f"Recipe '{name}' needs policy=text for its {key}.")
            settings = {"engine": (NATIVE, config.engine), "num_workers": (0, config.num_workers)}
            required = {setting: pair for setting, pair in settings.items() if setting in needs}
            if any(value != expected for expected, value in required.values()):
                text = " and ".join(f"{setting}={expected}" for setting, (expected, _) in required.items())
                raise UserError(f"Recipe '{name}' needs {text} for its {key}.")
            if "vocabulary" in needs and self.policy.vocabulary > MAX_VOCAB:
                raise UserError(
                    f"Recipe '{name}' stores the support of every token, which supports vocabularies of at most "
                    f"{MAX_VOCAB} tokens, but the policy has {self.policy.vocabulary}."
                )

    @property
    def requires_teacher(self) -> bool:
        """Whether the recipe needs a teacher."""
        return any("teacher" in option.needs for option in self.options.values())

    def annotators(self) -> dict[str, RolloutAnnotator]:
        """Return the annotators that the recipe requests."""
        given = {name: annotator for option in self.options.values() for name, annotator in option.annotators().items()}
        return requested_annotators(self.recipe.plain, given)

    def _needs_reference(self) -> bool:
        """Whether the recipe needs the reference from the start; other recipes create it on demand."""
        plain = self.recipe.plain
        if any(annotator.needs_initial_policy for annotator in self.annotators().values()):
            return True
        kl = (plain["estimator"] or {}).get("kl_coef", 0.0) != 0.0 or "kl" in plain["controllers"]
        return bool(kl or self.recipe.data in ("pairs", "offline"))

    def learning_rate(self) -> float:
        """Return the learning rate of this update; the schedule of the recipe starts after supervised fine-tuning."""
        config, done = self.config, self.updates - self.config.sft_updates
        if done < 0:
            return warmup_linear(config.sft_lr, config.sft_lr, self.updates, config.sft_updates, config.warmup)
        final = config.lr if config.lr_final is None else config.lr_final
        return warmup_linear(config.lr, final, done, self.total_updates - config.sft_updates, config.warmup)

    def update(self, batch: Decisions | Sequence[Sequence[str]]) -> Metrics:
        """Select rows, compute advantages and run the recipe's epochs; without a selected row, the weights stay.

        The first `sft_updates` batches are conversations for supervised fine-tuning.
        """
        if not isinstance(batch, Decisions):
            metrics = self.sft_step(batch)
            if self.updates == self.config.sft_updates:  # the recipe starts with a fresh optimizer
                self.optimizer.state.clear()
                self.reference_policy = None if self.reference_policy is None else self._initial_reference()
                self._after_update()
            return metrics
        first = self.reference_policy is None and self.updates == self.config.sft_updates
        saved = copy.deepcopy((self.recipe.state_dict(), self.generator.get_state())) if first else None
        try:
            return self._update(move(batch, self.policy.device))
        except MissingField as error:
            if "logp_ref" in str(error) and saved is not None:
                self.reference_policy = self._initial_reference()  # the policy is still the initial one
                self.recipe.load_state_dict(saved[0])
                self.generator.set_state(saved[1])
                return self.update(batch)
            raise UserError(
                f"Recipe '{self.config.recipe}' needs a field that text does not record: {error}"
            ) from error

    def set_teacher(self, teacher: Policy) -> None:
        """Set the teacher before the first update; raise a UserError if it does not fit."""
        if not isinstance(teacher, TextPolicy):
            raise UserError(f"algorithm.teacher must be a text policy, not '{teacher.name}'.")
        if any("tokens" in option.needs for option in self.options.values()):
            check_teacher(teacher, self.policy)
        self.teacher = teacher.to(self.policy.device)
        self.reference_policy = None if self.reference_policy is None else self._initial_reference()

    def _initial_reference(self) -> TextPolicy:
        """Return a copy of the policy, or its average with the teacher."""
        reference: TextPolicy = frozen_copy(self.policy)
        for option in self.options.values():
            option.modify_reference(reference, self)
        return reference

    def _after_update(self) -> None:
        for option in self.options.values():
            option.after_update(self)

    @property
    def score_settings(self) -> dict[str, Any]:
        """Further arguments of `TextPolicy.score` in this update."""
        settings: dict[str, Any] = {}
        for option in self.options.values():
            settings |= option.score_settings(self.updates - self.config.sft_updates)
        return settings

    def _update(self, batch: Decisions) -> Metrics:
        batch = self._preprocess(batch)
        self.policy.train()
        info: Info = {}
        metrics: Metrics = {"actor/nonzero_advantage_fraction": 0.0}
        infos: list[Info] = []  # of each minibatch
        rows = self.recipe.select(batch, self.generator)
        self.advantage = torch.zeros(len(batch), 1)
        if len(rows) and bool(batch.select(rows).valid().any()):
            decisions = batch.select(rows)
            advantage = self.recipe.advantage(decisions)
            self.influence = self._influence(decisions) if OBJECTIVES in decisions.extra else None
            targets = None if self.critic is None else self.recipe.value_targets(decisions)
            for _ in range(self.recipe.epochs):
                for index in self._minibatches(decisions):
                    fitted = None if targets is None else (targets[0][index], targets[1][index])
                    loss, info = self._loss(decisions.select(index), advantage[index], fitted)
                    metrics |= self.optimizer_step(loss)
                    infos.append(info)
            metrics |= make_metrics({"actor/nonzero_advantage_fraction": (advantage != 0).any(1).float().mean()})
            zeros = advantage.new_zeros(len(batch), advantage.shape[1])
            self.advantage = zeros.index_copy_(0, rows, advantage)
        self.recipe.observe(batch, info)
        self.updates += 1
        self._after_update()
        metrics |= make_metrics({f"actor/{key}": _mean([part[key] for part in infos]) for key in info})
        return metrics | {"actor/row_fraction": len(rows) / len(batch)}

    def _loss(
        self, part: Decisions, advantage: torch.Tensor, fitted: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, Info]:
        """Compute the loss of a minibatch: recipe and critic, or only the critic during its warm-up."""
        critic = self.recipe.critic
        if self.critic is None or critic is None or fitted is None:
            out = score(self.policy, part, **self.score_settings)
            return self.recipe.loss(part, advantage, out.logp, out.entropy)
        out, value = score_with_value(self.policy, self.critic, part, detach=critic.detach)
        loss, info = self.recipe.loss(part, advantage, out.logp, out.entropy)
        error = critic.loss(value, part, *fitted)
        info |= {"value_loss": error.detach(), "value_explained": explained_variance(value.detach(), *fitted)}
        warming_up = self.updates - self.config.sft_updates < critic.warmup
        return critic.coef * error + (0.0 if warming_up else 1.0) * loss, info

    def _influence(self, decisions: Decisions) -> torch.Tensor:
        """Compute the improvement of each objective by an update for all, with rows weighted by their group scores."""
        scores = group_scores(decisions.extra[OBJECTIVES], decisions.require("group"))
        learned = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        total = torch.zeros((), device=self.policy.device)
        for part, own in zip(_blocks(decisions), scores.split(SCORING_BATCH), strict=True):
            valid = part.valid()
            logp = score(self.policy, part, **self.score_settings).logp
            mean = logp.masked_fill(~valid, 0.0).sum(1) / valid.sum(1).clamp(min=1)
            gradients = [flat_gradient((mean * weight).sum() / len(decisions), learned) for weight in own.T]
            total = total + torch.stack(gradients)
        return influence(total).detach().cpu()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, including a reference that was created on demand."""
        if "reference" in state and self.reference_policy is None:
            self.reference_policy = frozen_copy(self.policy)
        super().load_state_dict(state)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Return the items of the base class, the recipe, the reference, the critic and the options."""
        others = {"recipe": self.recipe, "reference": self.reference_policy, "critic": self.critic}
        items = {**super().checkpoint_items(), **{name: part for name, part in others.items() if part is not None}}
        for option in self.options.values():
            items |= option.checkpoint_items()
        return items

    def _minibatches(self, decisions: Decisions) -> list[torch.Tensor]:
        count = self.config.minibatches or self.recipe.minibatches
        if count == 1:
            return [torch.arange(len(decisions), device=self.policy.device)]
        size = -(-len(decisions) // count)
        return list(group_minibatches(decisions.require("group"), size, self.generator))

    @torch.no_grad()
    def _preprocess(self, batch: Decisions) -> Decisions:
        """Mask overlong rows if configured, score rows again if needed, and add the fields that the recipe uses."""
        mask = batch.valid()
        if self.config.overlong == "mask":
            mask = mask & ~batch.extra["truncated"][:, None]
        batch = batch.with_fields(mask=mask)
        if self.policy.config.dtype != "float32" or self.config.engine != NATIVE or self.score_settings:
            behaviour = batch.logp_old if batch.logp_behaviour is None else batch.logp_behaviour
            out = self.score_rows(self.policy, batch, **self.score_settings)
            source = batch.require("source")[:, None]
            logp = torch.where((source == REPLAYED) | (source == TEACHER), batch.logp_old, out.logp)
            batch = batch.with_fields(logp_old=logp, logp_behaviour=behaviour, entropy=out.entropy)
        elif batch.logp_behaviour is None:
            batch = batch.with_fields(logp_behaviour=batch.logp_old)
        if self.reference_policy is not None:
            batch = batch.with_fields(logp_ref=self.score_rows(self.reference_policy, batch).logp)
        for option in self.options.values():
            batch = option.add_scores(batch, self)
        batch = with_features(self.policy, batch, self.features)
        if self.critic is not None:
            pieces = [score_with_value(self.policy, self.critic, part)[1] for part in _blocks(batch)]
            batch = batch.with_fields(value=torch.cat(pieces))
        return batch

    @torch.no_grad()
    def score_rows(self, policy: TextPolicy, batch: Decisions, **settings: Any) -> DecisionOutput:
        """Score all rows of a batch under a policy; `settings` are arguments of `robopolicy.text.text_env.score`."""
        parts = [score(policy, part, **settings) for part in _blocks(batch)]
        return DecisionOutput(torch.cat([part.logp for part in parts]), torch.cat([part.entropy for part in parts]))


def _within_groups(stages: Any) -> bool:
    """Whether stages of the advantage compare the rollouts of a group."""
    if isinstance(stages, Mapping):
        return stages.get("partition") == "group" or any(map(_within_groups, stages.values()))
    return isinstance(stages, list | tuple) and any(map(_within_groups, stages))


def _mean(values: Sequence[Any]) -> Any:
    """Compute the mean of scalars, on their device if they are not on the CPU."""
    if isinstance(values[0], torch.Tensor) and values[0].device.type != "cpu":
        return torch.stack(list(values)).mean()
    return fmean(map(float, values))


def explained_variance(value: torch.Tensor, target: torch.Tensor, fitted: torch.Tensor) -> torch.Tensor:
    """Compute the fraction of the variance of the fitted targets that the values explain; 0 without targets."""
    if not bool(fitted.any()):
        return value.new_zeros(())
    variance = target[fitted].var(correction=0)
    return 1.0 - (target - value)[fitted].var(correction=0) / variance.clamp(min=1e-8)


def _blocks(batch: Decisions) -> list[Decisions]:
    return [batch.select(slice(at, at + SCORING_BATCH)) for at in range(0, len(batch), SCORING_BATCH)]
