"""What stands between a policy and a robot, in numpy: anything that answers an observation with a chunk of actions.

Shapes: To observation history, H chunk length, A action dimensions; no batch dimension, since a robot is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from robopolicy.spec import PolicySpec

Array = NDArray[np.float64]
Observed = Mapping[str, NDArray[Any]]  # {key: (To, ...)}, numbers in the units of the robot, images uint8


class ChunkSource(Protocol):
    """A bundle in this process, or a server somewhere else."""

    @property
    def spec(self) -> PolicySpec:
        """What it takes and gives."""
        ...

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """The chunk `(H, A)` for one observation.

        Args:
            obs: Observation history.
            prefix: Actions `(d, A)`, d < H, that will have been played when the chunk arrives and that it has to
                continue (real-time chunking); only where `takes_prefix`.

        Raises:
            UserError: The observation does not fit `spec`, or the source is gone; one line.
        """
        ...

    @property
    def takes_prefix(self) -> bool:
        """Whether `prefix` may be given."""
        ...

    def close(self) -> None:
        """Free what it holds; may be called twice."""
        ...
