"""Keys of a recipe as plain data; `robopolicy.core.recipe` puts one together. Imports no torch."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "source": "",  # row of the catalogue, e.g. S002; "" for baselines
    "title": "",
    "section": "",  # of the catalogue
    "status": "works",  # works | experimental | reconstructed
    "deviations": "",  # where it is not what the source does
    "data": "rollout",  # what it learns from: rollout | pairs | demonstrations | offline
    "start": "outcome",  # where the advantage starts
    "select": [],  # selectors, in order
    "advantage": [],  # stages, left to right
    "estimator": {},  # fields of EstimatorConfig; null: the objective stands alone
    "objective": None,  # a loss that sees whole groups, with its weight `coef` (1)
    "regularizers": [],  # further penalties, each with its weight `coef` (1)
    "controllers": {},  # term, or option of the surrogate -> controller in place of its constant
    "critic": None,  # how the values that the start needs are learned: fields of Critic; null: they are not
    "epochs": 1,  # passes over a batch
    "minibatches": 1,  # gradient steps per pass
    "group_size": 8,  # rollouts per prompt or start state
    "rollout": {},  # for the sampling side
}
"""The keys of a recipe and what they are where a recipe is silent."""

CHOICES = {
    "status": ("works", "experimental", "reconstructed"),
    "data": ("rollout", "pairs", "demonstrations", "offline"),
}
