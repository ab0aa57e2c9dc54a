"""Text grids: move to the goal, one move per turn; the reply is the position.

Metrics of a move are `legal` (the position changes), `efficiency` (step of a shortest path), `advantage` (reduction of
the distance to the goal in steps) and `safe` (it does not end in a pit).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from robopolicy.text.task import ADVANTAGE, FORMAT, SUBGOAL, TextEpisode, TextTask, Turn

SIZE = 4
PLACE = re.compile(f"[0-{SIZE - 1}]{{2}}")
MOVES = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}

Place = tuple[int, int]


class GridEpisode(TextEpisode):
    """One episode; walls block moves, invalid words do nothing, and a pit can be left."""

    def __init__(self, seed: int, pits: int = 0) -> None:
        """Draw different positions for goal, start and at most one pit."""
        places = np.random.default_rng(seed).permutation(SIZE * SIZE).tolist()
        self.at, self.goal, *pit = (divmod(place, SIZE) for place in places[: 2 + pits])
        self.far = distances(self.goal, pit)
        self._pits = pit
        pit_text = "".join(f" pit {x}{y}" for x, y in pit)
        self.prompt = f"goal {self.goal[0]}{self.goal[1]}{pit_text} at {self.at[0]}{self.at[1]}:"

    def step(self, completion: str) -> Turn:
        """Move."""
        word = completion.strip()
        before, self.at = self.at, moved(self.at, word)
        gain = self.far[before] - self.far[self.at]
        grades = {FORMAT: word in MOVES, "legal": before != self.at, "efficiency": gain > 0}
        metrics = {name: float(grade) for name, grade in grades.items()} | {ADVANTAGE: float(gain)}
        if self._pits:
            metrics["safe"] = float(self.at not in self._pits)
        if self.at == self.goal:
            return Turn(1.0, success=True, metrics=metrics)
        return Turn(0.0, done=False, reply=f" at {self.at[0]}{self.at[1]}:", metrics=metrics)

    def demonstration(self) -> list[str]:
        """Return a shortest path around the pit, east or west first if possible."""
        at, words = self.at, list[str]()
        while at != self.goal:
            words.append(min(("e", "w", "n", "s"), key=lambda word: self.far[moved(at, word)]))
            at = moved(at, words[-1])
        return words


class Grid(TextTask):
    """Grid with paths of at most six moves, in eight turns."""

    name = "text/grid"
    prompt_bytes, completion_bytes, max_turns = 96, 3, 8
    response_pattern = "[nsew]"

    def episode(self, seed: int) -> GridEpisode:
        """Draw start and goal."""
        return GridEpisode(seed)


class Pits(Grid):
    """Grid with a pit, which affects only the metric `safe`."""

    name = "text/pits"
    prompt_bytes = 104

    def episode(self, seed: int) -> GridEpisode:
        """Draw start, goal and pit."""
        return GridEpisode(seed, pits=1)


class WaypointEpisode(GridEpisode):
    """Episode with optional announcements of waypoints such as `30`, which take a turn."""

    def step(self, completion: str) -> Turn:
        """Announce a waypoint, or move."""
        word = completion.strip()
        if PLACE.fullmatch(word) is None:
            turn = super().step(completion)
            return replace(turn, metrics={**turn.metrics, SUBGOAL: 0.0})
        metrics = {FORMAT: 1.0, "legal": 1.0, "efficiency": 0.0, ADVANTAGE: 0.0, SUBGOAL: 1.0}
        return Turn(0.0, done=False, reply=f" at {self.at[0]}{self.at[1]}:", metrics=metrics)

    def demonstration(self) -> list[str]:
        """Return moves east or west to an announced waypoint, and from there to the goal."""
        words, corner = super().demonstration(), f"{self.goal[0]}{self.at[1]}"
        turns = sum(word in "ew" for word in words)
        legs = [(corner, words[:turns]), (f"{self.goal[0]}{self.goal[1]}", words[turns:])]
        return [word for place, leg in legs if leg for word in (place, *leg)]


class Waypoints(Grid):
    """Grid with announced waypoints: subgoals set by the policy."""

    name = "text/waypoints"
    prompt_bytes, completion_bytes, max_turns = 136, 4, 11
    response_pattern = f"[nsew]|[0-{SIZE - 1}][0-{SIZE - 1}]"

    def episode(self, seed: int) -> WaypointEpisode:
        """Draw start and goal."""
        return WaypointEpisode(seed)


def moved(at: Place, word: str) -> Place:
    """Return the position after a word."""
    dx, dy = MOVES.get(word, (0, 0))
    return min(max(at[0] + dx, 0), SIZE - 1), min(max(at[1] + dy, 0), SIZE - 1)


def distances(goal: Place, pits: list[Place]) -> Mapping[Place, int]:
    """Count the steps to the goal from every position on paths around the pits."""
    found, waiting = {goal: 0}, deque([goal])
    while waiting:
        at = waiting.popleft()
        for target in (moved(at, word) for word in MOVES):
            if target not in found and target not in pits:
                found[target] = found[at] + 1
                waiting.append(target)
    neighbors = {
        pit: [found[target] for target in (moved(pit, word) for word in MOVES) if target != pit] for pit in pits
    }
    return found | {pit: 1 + max(steps) for pit, steps in neighbors.items()}
