"""Interface between policies and robots in numpy: from an observation to a chunk of actions.

Shapes: To observation history, H chunk length, A action dimensions; no batch dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robopolicy.spec import PolicySpec

Array = NDArray[np.float64]
Observed = Mapping[str, NDArray[Any]]  # {key: (To, ...)}, numbers in the units of the robot, images uint8


class ChunkPolicy(Protocol):
    """Interface of policies of action chunks: a bundle, a checkpoint or a server."""

    @property
    def spec(self) -> PolicySpec:
        """Specification of the policy."""
        ...

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Return the chunk `(H, A)` for one observation.

        Args:
            obs: Observation history.
            prefix: Actions `(d, A)`, d < H, to be executed before the chunk arrives, which it continues (real-time
                chunking); requires `takes_prefix`.

        Raises:
            UserError: The observation does not fit `spec`, or the policy is unavailable.
        """
        ...

    @property
    def takes_prefix(self) -> bool:
        """Whether `chunk` accepts a prefix."""
        ...

    def close(self) -> None:
        """Free resources; safe to call twice."""


def start_episode(source: ChunkPolicy, seed: int) -> None:
    """Reset a policy with state or noise for episode `seed`; servers have no episodes."""
    if reset := getattr(source, "reset", None):
        reset(seed)
