"""Tests of the few-step benchmark: pooled seeds, and the same weights for all samplers."""

from typing import Any

import pytest
import torch

from benchmarks import few_step
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy


def cell(seed: int, success: float) -> dict[str, Any]:
    run = {"network_calls": 4, "success": success, "low": 0.0, "high": 1.0, "n": 200, "ms_per_action": 0.1 * (seed + 1)}
    run |= {"network_calls_per_action": 1.0, "latency_ms": 0.4}
    return {"learner": "flow", "task": "lift", "seed": seed, "train_seconds": 10.0, "samplers": {"K=4": run}}


def test_rows_pool_the_episodes_of_all_seeds() -> None:
    rows, figures = few_step.summarise([cell(0, 0.5), cell(1, 0.9), cell(2, 1.0)])
    result = figures["results"]["flow K=4"]
    assert (result["success"], result["n"], result["network_calls"]) == (pytest.approx(0.8), 600, 4)
    assert result["low"] < 0.8 < result["high"] and result["ms_per_action"] == pytest.approx(0.2)
    assert rows[0]["by seed"] == "50% 90% 100%" and figures["seeds"] == [0, 1, 2]


def test_a_sampler_changes_the_calls_and_not_the_weights() -> None:
    raw = {"normalization": "identity", "action_normalization": "identity"}
    policy = FlowPolicy(FlowConfig(hidden=(8,), **raw), PolicySpec({"state": (2,)}, 1))  # type: ignore[arg-type]
    other = few_step.with_sampler(policy, {"steps": 10})
    assert (policy.nfe, other.nfe) == (4, 10)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in policy.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flow", "reflow", "distilled"])
def test_a_cell_trains_and_evaluates(name: str) -> None:
    settings = few_step.Settings(demonstrations=2, updates=2, batch_size=8, episodes=2)
    found = few_step.run_cell(name, 0, settings)
    assert list(found["samplers"]) == list(few_step.LEARNERS[name].samplers)
    assert all(run["n"] == 2 and run["latency_ms"] > 0 for run in found["samplers"].values())
