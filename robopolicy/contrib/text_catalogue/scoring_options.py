"""Scoring options of single recipes, each a key of `rollout`.

score_temperatures: {KEY: FACTOR}   extra[KEY] (N, T): log-probabilities at FACTOR times the temperature of the row
reference: average                  the reference has the average weights of the initial policy and the teacher
layer: {number: K, updates: U}      the first U updates train the output layer applied to hidden layer K
support: {top_p: P, refresh: U}     sampling is restricted to the top-p tokens of a copy of the policy, updated every U
                                    updates
segments: {every: K, below: P}      split messages after every K-th token less likely than P; units are such segments
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from robopolicy.algorithms.common.algorithm import Checkpointable, frozen_copy
from robopolicy.constraints import NonNegativeInt, Positive, PositiveFraction, PositiveInt
from robopolicy.contrib.text_catalogue.annotators import SegmentValue
from robopolicy.contrib.text_catalogue.references import average_weights
from robopolicy.core.decisions import Decisions
from robopolicy.core.options import validate_option
from robopolicy.errors import UserError
from robopolicy.text.annotators import RolloutAnnotator
from robopolicy.text.policy import TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.scoring_options import ScoringOption
from robopolicy.text.text_env import TextEnv


def entries(key: str, value: Any, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Validate the mapping under a key of `rollout`; all entries are required.

    Raises:
        ValueError: An entry is missing, unknown or invalid.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"rollout.{key} must be a mapping, got {value!r}.")
    if value.keys() != hints.keys():
        raise ValueError(f"rollout.{key} requires {' and '.join(hints)}, got {dict(value)}.")
    return {name: validate_option(f"rollout.{key}.{name}", hint, value[name]) for name, hint in hints.items()}


@dataclass(frozen=True)
class TemperatureScores(ScoringOption):
    """Scores of the responses at other temperatures (Li et al. 2026)."""

    factors: Mapping[str, float]  # of the temperature of each row, by key of `extra`

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse the value."""
        return cls(validate_option("rollout.score_temperatures", Mapping[str, Positive], value))

    def add_scores(self, rows: Decisions, learner: TextRecipe) -> Decisions:
        """Score at every temperature."""
        found = dict(rows.extra)
        for key, factor in self.factors.items():
            temperatures = rows.extra["temperature"] * factor
            warmer = rows.with_fields(extra={**rows.extra, "temperature": temperatures})
            found[key] = learner.score_rows(learner.policy, warmer).logp
        return rows.with_fields(extra=found)


@dataclass(frozen=True)
class AveragedReference(ScoringOption):
    """A reference that averages the initial policy and the teacher (SALSA, Chegini et al. 2024)."""

    needs: ClassVar[Collection[str]] = ("teacher", "tokens")

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse the value."""
        if value != "average":
            raise ValueError(f"rollout.reference must be average, got {value!r}.")
        return cls()

    def modify_reference(self, reference: TextPolicy, learner: TextRecipe) -> None:
        """Average the weights."""
        if learner.teacher is None:
            return
        try:
            reference.load_state_dict(average_weights([reference.state_dict(), learner.teacher.state_dict()]))
        except (RuntimeError, ValueError) as error:
            raise UserError(f"algorithm.teacher must have the architecture of the policy: {error}") from error


@dataclass(frozen=True)
class HiddenLayer(ScoringOption):
    """Training of a hidden layer, then of the policy (BuPO, Tan et al. 2025)."""

    number: int  # of the hidden layer
    updates: int  # number of updates that train it
    needs: ClassVar[Collection[str]] = ("causal",)

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse the value."""
        return cls(**entries("layer", value, {"number": NonNegativeInt, "updates": NonNegativeInt}))

    def score_settings(self, update: int) -> dict[str, Any]:
        """Return the hidden layer in the first updates."""
        return {"layer": self.number} if update < self.updates else {}


class TopPSupport(ScoringOption):
    """Restriction of sampling to likely tokens of a copy of the policy (NLPO, Ramamurthy et al. 2022)."""

    needs = ("causal", "engine", "num_workers", "vocabulary")

    def __init__(self, top_p: float, refresh: int) -> None:
        """Validate and store the options.

        Args:
            top_p: Total probability of the allowed tokens.
            refresh: Updates between copies.
        """
        self.top_p, self.refresh = top_p, refresh
        self.guide: TextPolicy | None = None  # set by `setup`

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse the value."""
        return cls(**entries("support", value, {"top_p": PositiveFraction, "refresh": PositiveInt}))

    def setup(self, learner: TextRecipe) -> None:
        """Copy the policy."""
        self.guide = frozen_copy(learner.policy)

    def configure_env(self, env: TextEnv, learner: TextRecipe) -> None:
        """Restrict sampling to the top-p tokens of the copy."""
        env.limits |= {"guide": self.guide, "top_p": self.top_p}

    def after_update(self, learner: TextRecipe) -> None:
        """Update the copy, at its interval and after supervised fine-tuning."""
        assert self.guide is not None
        if learner.updates == learner.config.sft_updates or learner.updates % self.refresh == 0:
            self.guide.load_state_dict(learner.policy.state_dict())

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Return the copy."""
        return {} if self.guide is None else {"guide": self.guide}


@dataclass(frozen=True)
class SegmentValueOption(ScoringOption):
    """Segments of messages, split where the policy is uncertain, with values at the splits (Guo et al. 2025)."""

    every: int
    below: float
    needs: ClassVar[Collection[str]] = ("causal",)

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse the value."""
        return cls(**entries("segments", value, {"every": PositiveInt, "below": PositiveFraction}))

    def annotators(self) -> Mapping[str, RolloutAnnotator]:
        """Return the annotator of values at the splits."""
        return {"segments": SegmentValue(self.every, self.below)}
