"""GRPO with one part of another text method each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from robopolicy.recipe_files import read_recipe

PLAIN = "plain"


@dataclass(frozen=True)
class Part:
    """Change of one row to the recipe of GRPO."""

    source: str
    estimator: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: dict[str, str] = field(default_factory=dict[str, str])  # section of the recipe -> recipe it comes from


PARTS: dict[str, Part] = {
    PLAIN: Part("GRPO's clip"),
    "gradient_preserving": Part(
        "GPPO's clip",
        {
            "surrogate": "gradient_preserving",
            "surrogate_options": {"low_gain": 0.3, "high_gain": 0.3, "cap": 1.5},
        },
    ),
    "ratio_variance": Part(
        "R2VPO's bound",
        {"surrogate": "importance_sampling", "ratio_variance_coef": 1.0},
        {"controllers": "r2vpo"},
    ),
    "hierarchical": Part(
        "FiberPO's ratio",
        {
            "level": "hierarchical",
            "hierarchy": {"outer": "sequence", "budget_up": 0.3, "budget_down": 0.15, "residual": 0.5},
            "surrogate": "importance_sampling",
        },
    ),
    "dynamic_bounds": Part(
        "DCPO's bounds", {"bounds": {"name": "probability", "low": 0.16, "high": 0.2, "limit": 10.0}}
    ),
    "stopped_gradient": Part(
        "CISPO's weights", {"bounds": {"name": "constant", "low": 1.0, "high": 0.28}, "surrogate": "cispo"}
    ),
    "sibling_baseline": Part("LOOP's baseline", taken={"advantage": "rloo"}),  # mean of the others, without division
}


def recipe(part: str) -> dict[str, Any]:
    """GRPO with one part of another method."""
    plain, row = read_recipe("grpo"), PARTS[part]
    taken = {section: read_recipe(other)[section] for section, other in row.taken.items()}
    return {**plain, "estimator": {**plain["estimator"], **row.estimator}, **taken}
