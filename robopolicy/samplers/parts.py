"""The slots of the sampling side, beside those of the core: `core.parts.build` knows them once this is imported."""

from __future__ import annotations

from robopolicy.core.parts import NESTED, REGISTRIES, build
from robopolicy.samplers.curricula import SAMPLERS
from robopolicy.samplers.interventions import INTERVENTIONS
from robopolicy.samplers.rewards.composition import REWARDS
from robopolicy.samplers.staleness import STALENESS
from robopolicy.samplers.topologies import TOPOLOGIES

REGISTRIES.update(
    sampler=SAMPLERS, topology=TOPOLOGIES, intervention=INTERVENTIONS, reward=REWARDS, staleness=STALENESS
)
NESTED.update(inner="topology")

__all__ = ["build"]
