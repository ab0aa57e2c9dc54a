"""Tests of the benchmark rows of the control theme."""

from __future__ import annotations

import pytest
from benchmark_rules import check_control_row_starts, check_pendulum_row_can_be_built

from benchmarks.control.cell import settings
from benchmarks.control.methods import LEFT_OUT, METHODS
from benchmarks.control.tasks import TASKS
from benchmarks.pendulum.cell import ROWS
from benchmarks.pendulum.study import CLAIMS
from benchmarks.themes import contributed
from robopolicy.contrib.control.stac import STACConfig
from robopolicy.training.compose import compose_config


@pytest.mark.parametrize("name", contributed("control", "methods"))
def test_every_row_can_start_with_its_budget(name: str) -> None:
    check_control_row_starts(name)


@pytest.mark.parametrize("name", contributed("pendulum", "rows"))
def test_every_row_on_the_pendulum_can_be_built(name: str) -> None:
    check_pendulum_row_can_be_built(name)


def test_claims_refer_to_existing_rows() -> None:
    assert {row for name, claims in CLAIMS.items() for row in (name, *(claim.against for claim in claims))} <= set(ROWS)


def test_stac_has_the_published_dropout_of_actor_and_critic() -> None:
    config = compose_config(settings(METHODS["stac"], TASKS["hopper"], 0))
    assert config.policy["hidden_dropout"] == 0.01
    assert STACConfig().critic.dropout == 0.01


def test_ppo_lagrangian_and_subpo_are_not_ranked() -> None:
    assert {"ppo_lagrangian", "subpo"} <= set(LEFT_OUT)
