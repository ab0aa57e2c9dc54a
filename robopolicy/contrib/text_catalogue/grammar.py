"""Constrained generation: only tokens that continue a well-formed response are allowed.

Source: ShIOEnv, Ragsdale and Boppana 2025.

grammar: true       key of `rollout` in a recipe: responses match the pattern of the task
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.text.recipe_trainer import TextRecipe
from robopolicy.text.scoring_options import ScoringOption
from robopolicy.text.text_env import TextEnv
from robopolicy.text.tokenizers import Tokenizer


class Grammar:
    """Regular expression that messages must match; the allowed tokens are cached for every beginning of a message."""

    def __init__(self, form: str, tokenizer: Tokenizer) -> None:
        """Validate and store the options.

        Args:
            form: Regular expression of the package `regex`, which supports partial matches.
            tokenizer: Tokenizer of the policy; tokens without text are never allowed.

        Raises:
            UserError: The expression is invalid, or `regex` is not installed.
        """
        package: Any = require("regex", "text")
        try:
            self._form = package.compile(form)
        except package.error as error:
            raise UserError(f"The form '{form}' is not a regular expression: {error}.") from error
        self.words = [tokenizer.decode([token]) for token in range(tokenizer.size)]
        self._eos = tokenizer.eos
        self._known: dict[str, Tensor] = {}

    def allowed(self, written: str) -> Tensor:
        """Return the allowed next tokens `(V,)` bool: `eos` if the message is complete or cannot be completed."""
        if written not in self._known:
            found = [bool(word) and self._form.fullmatch(written + word, partial=True) for word in self.words]
            support = torch.tensor([match is not None and match is not False for match in found])
            support[self._eos] = self._form.fullmatch(written) is not None or not bool(support.any())
            self._known[written] = support
        return self._known[written]


@dataclass(frozen=True)
class FormOption(ScoringOption):
    """Restriction of responses to the pattern of the task."""

    needs: ClassVar[Collection[str]] = ("causal", "engine", "num_workers", "vocabulary")

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Parse `true`."""
        if value is not True:
            raise ValueError(f"rollout.grammar must be true, got {value!r}.")
        return cls()

    def configure_env(self, env: TextEnv, learner: TextRecipe) -> None:
        """Restrict the tokens to the pattern of the task."""
        if not env.task.response_pattern:
            raise UserError(
                f"Recipe '{learner.config.recipe}' needs a response pattern, and task {env.task.name} has "
                "none (`TextTask.response_pattern`); choose another recipe or task."
            )
        env.limits["allowed"] = Grammar(env.task.response_pattern, env.policy.tokenizer).allowed
