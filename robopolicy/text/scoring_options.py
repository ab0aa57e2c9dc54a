"""Keys of `rollout` that the learner uses, for further scores of the rows.

    score_with: {KEY: teacher}    extra[KEY] (N, T): log-probabilities under the teacher

A key is an entry of `SCORING_OPTIONS`: a class that parses its value and provides hooks for the learner and for the
source of its rollouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from robopolicy.algorithms.common.algorithm import Checkpointable
from robopolicy.core.decisions import Decisions
from robopolicy.core.options import validate_option
from robopolicy.errors import UserError
from robopolicy.plugins import Registry
from robopolicy.text.annotators import RolloutAnnotator
from robopolicy.text.policy import TextPolicy
from robopolicy.text.task import KEY
from robopolicy.text.text_env import TextEnv
from robopolicy.text.tokenizers import same_tokens

if TYPE_CHECKING:
    from robopolicy.text.recipe_trainer import TextRecipe


class ScoringOption(ABC):
    """One key of `rollout`; every hook does nothing by default."""

    needs: Collection[str] = ()
    """Requirements: a "teacher", one that can score the policy's "tokens", a "causal" policy, the native "engine",
    rollouts in this process ("num_workers"), or a "vocabulary" small enough to store the support of every token."""

    @classmethod
    @abstractmethod
    def parse(cls, value: Any) -> Self:
        """Build the option from a plain value; raise a ValueError if it is invalid."""

    def setup(self, learner: TextRecipe) -> None:
        """Set up the option for a learner."""

    def configure_env(self, env: TextEnv, learner: TextRecipe) -> None:
        """Set `limits` or `judge` of the environment; raise a UserError if the task does not support the option."""

    def modify_reference(self, reference: TextPolicy, learner: TextRecipe) -> None:
        """Change the weights of the initial reference, a copy of the policy."""

    def score_settings(self, update: int) -> dict[str, Any]:
        """Return further arguments of `TextPolicy.score` in an update of the recipe."""
        return {}

    def add_scores(self, rows: Decisions, learner: TextRecipe) -> Decisions:
        """Add fields to the rows of a batch."""
        return rows

    def after_update(self, learner: TextRecipe) -> None:
        """Update the state of the option after every update and after supervised fine-tuning."""

    def annotators(self) -> Mapping[str, RolloutAnnotator]:
        """Return annotators by name."""
        return {}

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Return further items for checkpoints of the learner by name."""
        return {}


@dataclass(frozen=True)
class TeacherScores(ScoringOption):
    """Scores of the responses under the teacher."""

    keys: tuple[str, ...]  # of `extra`
    needs: ClassVar[Collection[str]] = ("teacher", "tokens")

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse {KEY: teacher}."""
        entries = validate_option("rollout.score_with", Mapping[str, str], value)
        if unknown := set(entries.values()) - {"teacher"}:
            raise ValueError(f"Values of rollout.score_with must be teacher, got {', '.join(sorted(unknown))}.")
        return cls(tuple(entries))

    def add_scores(self, rows: Decisions, learner: TextRecipe) -> Decisions:
        """Score with the teacher."""
        assert learner.teacher is not None  # checked by `recipe_source`
        check_context(learner.teacher, rows.extra["tokens"].shape[1])
        found = {key: learner.score_rows(learner.teacher, rows).logp for key in self.keys}
        return rows.with_fields(extra={**rows.extra, **found})


def check_teacher(teacher: TextPolicy, policy: TextPolicy) -> None:
    """Raise a UserError unless the teacher can score the tokens of the policy; a judge reads text instead."""
    template, own = teacher.config.template, policy.config.template
    templates_differ = template != own and bool(policy.config.tokenizer_bytes)  # bytes have no templates
    differences = {
        f"is a policy of type '{teacher.name}', not '{policy.name}'": teacher.score_fields != policy.score_fields,
        "has another tokenizer": not same_tokens(teacher.tokenizer, policy.tokenizer),
        f"has template={template}, not {own}": templates_differ,
        f"has {teacher.vocabulary} tokens, fewer than the {policy.vocabulary} of the policy": (
            teacher.vocabulary < policy.vocabulary
        ),
    }
    if found := [text for text, differs in differences.items() if differs]:
        raise UserError(f"algorithm.teacher must score the tokens of the policy, but it {found[0]}; choose another.")
    prompt = len(policy.tokenizer.prompt([""])) + policy.spec.observation[KEY][0]
    check_context(teacher, min(policy.context, prompt + policy.budget))


def check_context(teacher: TextPolicy, tokens: int) -> None:
    """Raise a UserError if conversations of this length exceed the context of the teacher."""
    if tokens > teacher.context:
        raise UserError(
            f"algorithm.teacher has a context of {teacher.context} tokens, but conversations of this task have up to "
            f"{tokens}; choose a teacher with a longer context."
        )


SCORING_OPTIONS: Registry[type[ScoringOption]] = Registry("scoring_options", {"score_with": TeacherScores})
"""Key of `rollout` -> class."""


def scoring_options(rollout: Mapping[str, Any]) -> dict[str, ScoringOption]:
    """Parse the options of a `rollout` section, by key; raise a ValueError if a value is invalid."""
    return {key: SCORING_OPTIONS[key].parse(value) for key, value in rollout.items() if key in SCORING_OPTIONS}
