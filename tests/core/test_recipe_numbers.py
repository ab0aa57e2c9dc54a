"""The hyperparameters of each recipe equal the catalogue values, independent of the defaults of the parts."""

from typing import Any

import pytest
from recipe_numbers import CLIP, ROLLOUT, STAGE, check_numbers

NUMBERS: dict[str, dict[str, Any]] = {
    "dapo": {CLIP + "low": 0.2, CLIP + "high": 0.28},
    "gigpo": {
        STAGE + "mix.branches.1.history_groups.longest": 0,
        STAGE + "mix.branches.1.history_groups.gamma": 0.95,
        STAGE + "mix.weights": [1.0, 1.0],
    },
    "gmpo": {"objective.low": 0.4, "objective.high": 0.4},
    "gspo": {CLIP + "low": 3e-4, CLIP + "high": 4e-4},
    "single_stream": {
        STAGE + "tracker_baseline.half_life": 0.06,
        STAGE + "tracker_baseline.keep": [0.875, 0.96],
        STAGE + "tracker_baseline.tracker.successes": 4.0,
        STAGE + "tracker_baseline.tracker.failures": 4.0,
        "estimator.surrogate_options.cap": 10.0,
        CLIP + "low": 0.2,
        CLIP + "high": 0.28,
        ROLLOUT + "sampler.floor": 0.05,
        "group_size": 1,
    },
    "clip_cov": {
        f"estimator.weights.clip_covariance.{key}": value
        for key, value in (("share", 2e-4), ("least", 1.0), ("most", 5.0), ("low", 0.2), ("high", 0.2))
    },
    "kl_cov": {"regularizers.covariance_kl.share": 2e-4, "regularizers.covariance_kl.coef": 1.0},
    "mdpo": {STAGE + "constant_scale.divisor": 1.0, "epochs": 4},
    "nft": {"estimator.surrogate_options.floor": 1.0},
    "digirl": {"advantage_source.penalty": 0.05, "advantage_source.gamma": 0.9},
    "arpo_agentic": {
        ROLLOUT + "strategy": {"name": "branch", "initial": 0.5, "beam": 2, "weight": 0.2, "threshold": 0.5},
        "group_size": 16,
    },
    "sapo": {"estimator.surrogate_options": {"up": 1.0, "down": 1.05}},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_recipe_has_the_hyperparameters_of_its_source(name: str) -> None:
    check_numbers(name, NUMBERS[name])
