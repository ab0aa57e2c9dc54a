"""Keys of a recipe as plain data; `robopolicy.core.recipe` builds it. Imports no torch."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "source": "",  # key in docs/references.bib, e.g. ao2026bounded, or free text
    "title": "",
    "status": "works",  # works | experimental | reconstructed
    "deviations": "",  # where it is not what the source does
    "data": "rollout",  # training data: rollout | pairs | demonstrations | offline
    "advantage_source": "outcome",  # input of the first advantage stage
    "select": [],  # selectors, in order
    "advantage": [],  # stages, left to right
    "estimator": {},  # fields of EstimatorConfig; null: only the objective
    "objective": None,  # a loss that sees whole groups, with its weight `coef` (1)
    "regularizers": [],  # further penalties, each with its weight `coef` (1)
    "controllers": {},  # term, or option of the surrogate -> controller in place of its constant
    "critic": None,  # value loss for the values that the advantage source needs: fields of Critic; null: none
    "epochs": 1,  # passes over a batch
    "minibatches": 1,  # gradient steps per pass
    "group_size": 8,  # rollouts per prompt or start state
    "rollout": {},  # for the sampling side
}
"""The keys of a recipe and their defaults."""

CHOICES = {
    "status": ("works", "experimental", "reconstructed"),
    "data": ("rollout", "pairs", "demonstrations", "offline"),
}
