"""The slots of the sampling side, beside those of the core: `core.parts.build` knows them once this is imported."""

from __future__ import annotations

from robopolicy.core.parts import NESTED, REGISTRIES, build
from robopolicy.plugins import Registry
from robopolicy.samplers.curricula import SAMPLERS
from robopolicy.samplers.protocols import Intervention, Reward
from robopolicy.samplers.staleness import STALENESS
from robopolicy.samplers.topologies import TOPOLOGIES

INTERVENTIONS: Registry[type[Intervention]] = Registry("parts.intervention", {})
REWARDS: Registry[type[Reward]] = Registry("parts.reward", {})

REGISTRIES.update(
    sampler=SAMPLERS, topology=TOPOLOGIES, intervention=INTERVENTIONS, reward=REWARDS, staleness=STALENESS
)
NESTED.update(inner="topology")

__all__ = ["build"]
