"""Tests of inpainting: rollouts that fill gaps in the solution replace failures."""

import pytest
import torch
from intervention_rules import check_leaves_solved_groups_alone, check_memory_resumes, failing, make
from secret_env import SecretSequenceEnv

from robopolicy.contrib.text_diffusion.recipe_parts import Inpaint
from robopolicy.text.rollouts.protocols import HINTED


@pytest.fixture(params=["tokens", "chain"])
def env(request) -> SecretSequenceEnv:
    return SecretSequenceEnv(request.param)


def test_inpaint_applies_only_to_failed_groups():
    check_leaves_solved_groups_alone("inpaint")
    assert make("inpaint").applies(torch.zeros(4))


def test_state_resumes(env):
    check_memory_resumes(env, "inpaint")


def test_inpainted_successes_replace_failures(env):
    """IGPO (Zhao et al. 2025): only successes replace failures, and the given tokens are masked."""
    after = Inpaint(count=3).apply(failing(env), env)
    filled = [trajectory for trajectory in after if trajectory.source == HINTED]
    assert len(after) == 4 and 1 <= len(filled) <= 3 and all(trajectory.success for trajectory in filled)
    for trajectory in filled:
        assert 1 <= int((~trajectory.decisions.valid()).sum()) <= 4


def test_defaults_match_the_source():
    assert (Inpaint().low, Inpaint().high) == (0.2, 0.6)
