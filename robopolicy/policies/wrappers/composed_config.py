"""Settings of composed policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from robopolicy.constraints import NonNegativeInt, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.policies.composition.guidance import Langevin, ValueGuidance

PROBE_SEED = 0  # of the random directions of divergences; equal for every chunk, so that chunks are reproducible


@dataclass(frozen=True)
class ComposedConfig(Validated):
    """Settings of a `ComposedPolicy`; created by `compose`."""

    parents: tuple[Any, ...] = ()  # descriptions of the parents (`nested.describe`)
    origins: tuple[str, ...] = ()  # origin of each parent, e.g. the content hash of its checkpoint; informative
    operator: dict[str, Any] = field(default_factory=lambda: {"name": "convex"})  # name and settings of the operator
    unconditioned: tuple[
        NonNegativeInt, ...
    ] = ()  # parents (from 0) also used without embeddings, as additional parents
    steps: PositiveInt | None = None  # K, equal steps; None: the steps of the parent with most steps
    guidance: ValueGuidance | None = None  # guidance of the samples by a critic
    corrector: Langevin | None = None  # Langevin steps in `act`, not in `decode`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.origins and len(self.origins) != len(self.parents):
            raise UserError(f"{len(self.parents)} parents need as many origins, got {len(self.origins)}.")
