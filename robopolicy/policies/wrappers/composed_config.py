"""Settings of composed policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from robopolicy.constraints import NonNegativeInt, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.policies.composition.guidance import Langevin, ValueGuidance

PROBE_SEED = 0  # of the directions in which divergences are estimated: the same for every chunk, so chunks repeat


@dataclass(frozen=True)
class ComposedConfig(Validated):
    """What a `ComposedPolicy` consists of; `compose` fills it in."""

    parents: tuple[Any, ...] = ()  # descriptions of the parents (`nested.describe`)
    origins: tuple[str, ...] = ()  # where each parent came from, e.g. the content hash of its checkpoint; only kept
    operator: dict[str, Any] = field(default_factory=lambda: {"name": "convex"})  # name and settings of the operator
    unconditioned: tuple[NonNegativeInt, ...] = ()  # parents (from 0) also read without embeddings, as further parents
    steps: PositiveInt | None = None  # K, equal steps; None takes those of the parent with most of them
    guidance: ValueGuidance | None = None  # a critic that pulls on the samples
    corrector: Langevin | None = None  # Langevin steps while acting; `decode` takes none

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.origins and len(self.origins) != len(self.parents):
            raise UserError(f"{len(self.parents)} parents need as many origins, got {len(self.origins)}.")
