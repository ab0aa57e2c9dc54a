"""Text tasks from generators of reasoning-gym, with their scorers."""

from __future__ import annotations

from typing import Any

from robopolicy.errors import unknown_name
from robopolicy.optional import require
from robopolicy.text.task import SingleTurn, TextTask

PROBLEMS = 2**31  # size of the generated set, indexed by episode seeds


class GymTask(TextTask):
    """One problem per seed, with the generator's default difficulty."""

    prompt_bytes, completion_bytes = 2048, 256

    def __init__(self, generator: str) -> None:
        """Create the problems of a generator, e.g. `chain_sum`."""
        library = require("reasoning_gym", "text")
        known = library.factory.DATASETS
        if generator not in known:
            raise unknown_name("reasoning-gym task", generator, known)
        self.name = f"reasoning_gym/{generator}"
        self._data: Any = library.create_dataset(generator, size=PROBLEMS, seed=0)

    def episode(self, seed: int) -> SingleTurn:
        """Return the problem of an index."""
        entry: dict[str, Any] = self._data[seed % PROBLEMS]
        score = self._data.score_answer
        return SingleTurn(
            entry["question"], lambda completion: score(answer=completion.strip(), entry=entry), entry["answer"]
        )
