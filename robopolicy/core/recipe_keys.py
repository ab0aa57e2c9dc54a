"""Keys of a recipe and their defaults. Imports no torch."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "source": "",  # key in docs/references.bib, e.g. ao2026bounded, or free text
    "title": "",
    "implementation": "complete",  # complete | partial | reconstructed; as its source in docs/methods.toml
    "deviations": "",  # from the source
    "data": "rollout",  # training data: rollout | pairs | demonstrations | offline
    "advantage_source": "outcome",  # input of the first advantage stage
    "select": [],  # selectors, in order
    "advantage": [],  # stages, left to right
    "estimator": {},  # fields of EstimatorConfig; null: only the objective
    "objective": None,  # a loss over whole groups, with its weight `coef` (1)
    "regularizers": [],  # further penalties, each with its weight `coef` (1)
    "controllers": {},  # loss term or option of the surrogate -> controller that replaces its constant
    "critic": None,  # fields of Critic, for an advantage source that needs values; null: none
    "epochs": 1,  # passes over a batch
    "minibatches": 1,  # gradient steps per pass
    "group_size": 8,  # rollouts per prompt or start state
    "rollout": {},  # rewards, samplers and rollout strategies
}

CHOICES = {
    "implementation": ("complete", "partial", "reconstructed"),
    "data": ("rollout", "pairs", "demonstrations", "offline"),
}
