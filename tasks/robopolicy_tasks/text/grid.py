"""Text grids: move to the goal, one move per turn; the reply is the position.

Metrics of a move are `legal` (the position changes), `efficiency` (step of a shortest path), `advantage` (reduction of
the distance to the goal in steps) and `safe` (it does not end in a pit).
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace

import numpy as np

from robopolicy.text.task import ADVANTAGE, FORMAT, SUBGOAL, TextEpisode, TextTask, Turn

SIZE = 4
LARGE, PITS, NEAR = 5, 2, 3  # size, pits and largest distance of `text/pits`, which has more than 100,000 problems
PLACE = re.compile(f"[0-{SIZE - 1}]{{2}}")
MOVES = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}

Place = tuple[int, int]


class GridEpisode(TextEpisode):
    """One episode; walls block moves, invalid words do nothing, and a pit can be left."""

    def __init__(self, seed: int, size: int = SIZE, pits: int = 0, near: int = 2 * SIZE) -> None:
        """Draw different positions for goal, start and pits.

        They are drawn again until the goal is at most `near` steps away, and the pits enclose no position.
        """
        draw = np.random.default_rng(seed)
        self.size, self.far, self.at = size, dict[Place, int](), (0, 0)
        while self.far.get(self.at, near + 1) > near:
            places = draw.permutation(size * size).tolist()
            self.at, self.goal, *pit = (divmod(place, size) for place in places[: 2 + pits])
            self.far = distances(self.goal, pit, size)
        self._pits = pit
        pit_text = "".join(f" pit {x}{y}" for x, y in pit)
        self.prompt = f"goal {self.goal[0]}{self.goal[1]}{pit_text} at {self.at[0]}{self.at[1]}:"

    def step(self, completion: str) -> Turn:
        """Move."""
        word = completion.strip()
        before, self.at = self.at, moved(self.at, word, self.size)
        gain = self.far[before] - self.far[self.at]
        grades = {FORMAT: word in MOVES, "legal": before != self.at, "efficiency": gain > 0}
        metrics = {name: float(grade) for name, grade in grades.items()} | {ADVANTAGE: float(gain)}
        if self._pits:
            metrics["safe"] = float(self.at not in self._pits)
        if self.at == self.goal:
            return Turn(1.0, success=True, metrics=metrics)
        return Turn(0.0, done=False, reply=f" at {self.at[0]}{self.at[1]}:", metrics=metrics)

    def demonstration(self) -> list[str]:
        """Return a shortest path around the pits, east or west first if possible."""
        at, words = self.at, list[str]()
        while at != self.goal:
            words.append(min(("e", "w", "n", "s"), key=lambda word: self.far[moved(at, word, self.size)]))
            at = moved(at, words[-1], self.size)
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
    """Larger grid with pits, which affect only the metrics, and a near goal, in five turns."""

    name = "text/pits"
    prompt_bytes, max_turns = 80, 5

    def episode(self, seed: int) -> GridEpisode:
        """Draw start, goal and pits."""
        return GridEpisode(seed, LARGE, PITS, NEAR)


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


def moved(at: Place, word: str, size: int = SIZE) -> Place:
    """Return the position after a word."""
    dx, dy = MOVES.get(word, (0, 0))
    return min(max(at[0] + dx, 0), size - 1), min(max(at[1] + dy, 0), size - 1)


def distances(goal: Place, pits: list[Place], size: int = SIZE) -> dict[Place, int]:
    """Count the steps to the goal from every position on paths around the pits; empty if the pits enclose a position.

    A pit is one step farther than its farthest neighbor.
    """
    found, waiting = {goal: 0}, deque([goal])
    while waiting:
        at = waiting.popleft()
        for target in (moved(at, word, size) for word in MOVES):
            if target not in found and target not in pits:
                found[target] = found[at] + 1
                waiting.append(target)
    if len(found) < size * size - len(pits):
        return {}
    neighbors = {pit: [found[at] for word in MOVES if (at := moved(pit, word, size)) in found] for pit in pits}
    return found | {pit: 1 + max(steps) for pit, steps in neighbors.items()}
