"""A grid world by words: walk to the goal, one move a turn, and hear where you stand after each."""

from __future__ import annotations

import numpy as np

from robopolicy.text.task import FORMAT, Episode, TextTask, Turn

SIZE = 4
MOVES = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}


class Walk(Episode):
    """One walk; walls stop a move, a word that is no move wastes it."""

    def __init__(self, seed: int) -> None:
        places = np.random.default_rng(seed).permutation(SIZE * SIZE)[:2]
        self.at, self.goal = (divmod(int(place), SIZE) for place in places)
        self.prompt = f"goal {self.goal[0]}{self.goal[1]} at {self.at[0]}{self.at[1]}:"

    def step(self, completion: str) -> Turn:
        """Move."""
        word = completion.strip()
        dx, dy = MOVES.get(word, (0, 0))
        form = {FORMAT: float(word in MOVES)}
        self.at = (min(max(self.at[0] + dx, 0), SIZE - 1), min(max(self.at[1] + dy, 0), SIZE - 1))
        if self.at == self.goal:
            return Turn(1.0, success=True, measures=form)
        return Turn(0.0, done=False, reply=f" at {self.at[0]}{self.at[1]}:", measures=form)

    def demonstration(self) -> list[str]:
        """East or west first, then north or south."""
        dx, dy = (goal - at for goal, at in zip(self.goal, self.at, strict=True))
        return ["e" if dx > 0 else "w"] * abs(dx) + ["n" if dy > 0 else "s"] * abs(dy)


class Grid(TextTask):
    """Walks of at most six moves, in eight turns."""

    name = "text/grid"
    prompt_bytes, completion_bytes, max_turns = 96, 3, 8
    form = "[nsew]"

    def episode(self, seed: int) -> Walk:
        """Start and goal are two different places."""
        return Walk(seed)
