"""Choice of episodes of a dataset: by success, length, quality and number, or at random."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from robopolicy.data.episodes import Episodes
from robopolicy.data.quality import idle_fraction, returns_of, trajectory_quality
from robopolicy.errors import UserError
from robopolicy.plurals import counted

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class EpisodeFilter:
    """Conditions that a chosen episode meets."""

    numbers: tuple[int, ...] | None = None  # from 0; None: all
    success: bool | None = None  # whether a step succeeded; None: either
    min_length: int = 0  # [control steps]
    max_length: int | None = None
    min_return: float = -math.inf  # undiscounted
    min_quality: float = -math.inf  # trajectory quality of the episode, between the returns of `references`
    references: tuple[float, float] | None = None  # mean returns of random actions and of the best policy
    max_idle: float = 1.0  # fraction of steps after which neither action nor state changes

    def choose(self, episodes: Episodes) -> Indices:
        """Return the numbers of the chosen episodes, sorted.

        Raises:
            UserError: The dataset lacks an episode, successes or rewards.
        """
        lengths, count = episodes.without_closing_frames().lengths, episodes.num_episodes
        chosen = np.ones(count, np.bool_)
        if self.numbers is not None:
            if missing := sorted(set(self.numbers) - set(range(count))):
                raise UserError(
                    f"The dataset has {counted(count, 'episode')}, numbered from 0; episode {missing[0]} is missing."
                )
            chosen = np.isin(np.arange(count), self.numbers)
        if self.success is not None:
            if "success" not in episodes.arrays:
                raise UserError("The dataset does not state which episodes succeeded.")
            chosen &= episodes.success == self.success
        chosen &= (lengths >= self.min_length) & (self.max_length is None or lengths <= self.max_length)
        if max(self.min_return, self.min_quality) > -math.inf:
            returns = returns_of(episodes.without_closing_frames())
            if returns is None:
                raise UserError("The dataset has no rewards, which a return or a quality needs.")
            chosen &= returns >= self.min_return
            if self.min_quality > -math.inf:
                if self.references is None:
                    raise UserError("Quality needs the returns of random actions and of the best policy.")
                random, best = self.references
                chosen &= np.array([trajectory_quality([value], random, best) for value in returns]) >= self.min_quality
        if self.max_idle < 1:
            idle = [idle_fraction(episodes.subset([number])) for number in range(count)]
            chosen &= np.array(idle) <= self.max_idle
        return np.flatnonzero(chosen)


def split_indices(count: int, size: int, seed: int) -> tuple[Indices, Indices]:
    """Divide `count` episodes at random into two parts, both sorted; the second has `size` of them.

    Raises:
        UserError: A part would be empty.
    """
    if not 0 < size < count:
        episodes = counted(count, "episode")
        raise UserError(f"{episodes} cannot be split into {count - size} and {size}; both parts need some.")
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])
