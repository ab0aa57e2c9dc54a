"""Constrained generation: only tokens that continue a well-formed response are allowed.

Source: ShIOEnv, Ragsdale and Boppana 2025.

grammar: true       key of `rollout` in a recipe: only responses of the task's pattern are generated
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
    """A regular expression that whole messages have to match.

    What may come next follows from what has been written; it is found once for every beginning of a message.
    """

    def __init__(self, form: str, tokenizer: Tokenizer) -> None:
        """Validate and store the options.

        Args:
            form: Regular expression of the package `regex`, which can match beginnings.
            tokenizer: Whose tokens are chosen; those that are no text by themselves never are.

        Raises:
            UserError: The expression cannot be read, or `regex` is not installed.
        """
        package: Any = require("regex", "text")
        try:
            self._form = package.compile(form)
        except package.error as error:
            raise UserError(f"The form '{form}' is no regular expression: {error}.") from error
        self.words = [tokenizer.decode([token]) for token in range(tokenizer.size)]
        self._eos = tokenizer.eos
        self._known: dict[str, Tensor] = {}

    def allowed(self, written: str) -> Tensor:
        """Tokens `(V,)` bool that may follow; the end where the message is complete, or cannot be completed."""
        if written not in self._known:
            found = [bool(word) and self._form.fullmatch(written + word, partial=True) for word in self.words]
            support = torch.tensor([match is not None and match is not False for match in found])
            support[self._eos] = self._form.fullmatch(written) is not None or not bool(support.any())
            self._known[written] = support
        return self._known[written]


@dataclass(frozen=True)
class FormOption(ScoringOption):
    """Restricts responses to the pattern of the task."""

    needs: ClassVar[Collection[str]] = ("causal", "engine", "num_workers", "vocabulary")

    @classmethod
    def parse(cls, value: Any) -> Self:
        """See the module docstring."""
        if value is not True:
            raise ValueError(f"rollout.grammar must be true, got {value!r}.")
        return cls()

    def configure_env(self, env: TextEnv, learner: TextRecipe) -> None:
        """Restrict the tokens to the pattern of the task."""
        if not env.task.response_pattern:
            raise UserError(
                f"Recipe '{learner.config.recipe}' generates responses of a pattern, and task {env.task.name} has "
                "none (`TextTask.response_pattern`); choose another recipe or task."
            )
        env.limits["allowed"] = Grammar(env.task.response_pattern, env.policy.tokenizer).allowed
