"""Failures are replaced by attempts that fill gaps in the solution."""

import pytest
import torch
from intervention_rules import check_leaves_solved_groups_alone, check_memory_resumes, failing, make
from playground import Playground

from robopolicy.contrib.text_diffusion.parts import Inpaint
from robopolicy.text.rollouts.protocols import HINTED


@pytest.fixture(params=["tokens", "chain"])
def world(request) -> Playground:
    return Playground(request.param)


def test_only_failed_groups_are_in_need():
    check_leaves_solved_groups_alone("inpaint")
    assert make("inpaint").triggered(torch.zeros(4))


def test_memory_resumes(world):
    check_memory_resumes(world, "inpaint")


def test_filled_gaps_replace_failures(world):
    """IGPO (Zhao et al. 2025): only what succeeds, and the given pieces are masked."""
    after = Inpaint(count=3).rows(failing(world), world)
    filled = [attempt for attempt in after if attempt.source == HINTED]
    assert len(after) == 4 and 1 <= len(filled) <= 3 and all(attempt.success for attempt in filled)
    for attempt in filled:
        assert 1 <= int((~attempt.decisions.valid()).sum()) <= 4


def test_the_numbers_of_the_source_are_the_defaults():
    assert (Inpaint().low, Inpaint().high) == (0.2, 0.6)
