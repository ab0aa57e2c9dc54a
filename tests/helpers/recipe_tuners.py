"""Recipes that fine-tune a denoising head, and a check for all of them."""

import math
import re
from typing import Any

import fine_tuning_tools as tools

from robopolicy.algorithms.recipe import RecipeFineTuner, RecipeFineTunerConfig
from robopolicy.errors import UserError

HEADS = {"flow": tools.flow_head, "diffusion": tools.diffusion_head}


def tuner(head: str = "flow", seed: int = 0, **overrides: Any) -> RecipeFineTuner:
    """A small fine-tuner."""
    settings = {"group_size": 4, "batch_size": 64} | overrides
    return RecipeFineTuner(RecipeFineTunerConfig(**settings), HEADS[head](seed), total_updates=20)


def check_updates_a_flow(name: str) -> None:
    """A recipe updates a flow, or names the field that robots do not record."""
    algorithm = tuner(recipe=name, group_size=8, epochs=1)
    before = tools.snapshot(algorithm.policy)
    rollout = tools.sampler_for(algorithm).collect(algorithm.act)
    try:
        metrics = algorithm.update(rollout)
    except UserError as error:
        assert re.search(r"needs Decisions\.(value|extra\['\w+'\]), which is missing", str(error))
    else:
        learned = tools.changed(before, algorithm.policy)
        assert learned or metrics["actor/row_fraction"] == 0  # some recipes use only successes, and this task has none
        assert all(math.isfinite(value) for value in metrics.values())
