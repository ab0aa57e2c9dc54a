"""Hand-computed tests of whether the mechanism of a recipe acts."""

import math

import pytest

pytest.importorskip("transformers")

import torch
from observed_recipes import observed_on_one_turn

from benchmarks.text.mechanism import (
    ADVANTAGE,
    BRANCHES,
    CALLS,
    LOSS,
    SURROGATE,
    Mechanism,
    difference,
    disproportion,
)
from robopolicy.core.decisions import Decisions
from robopolicy.core.recipe import Recipe
from robopolicy.recipe_files import read_recipe


def recipe(name):
    return Recipe.from_dict(read_recipe(name))


def rows(reward, ratio=1.0):
    """Four rollouts of one prompt with two decisions each, whose ratios are `ratio`."""
    reward = torch.tensor([[0.0, value] for value in reward])
    logp = torch.full((4, 2), -1.0)
    part = Decisions(
        logp, mask=torch.ones(4, 2, dtype=torch.bool), reward=reward, group=torch.zeros(4, dtype=torch.int64)
    )
    return part, logp + math.log(ratio), torch.ones(4, 2)


def compared(kind, name, reward=(1.0, 0.0, 0.0, 0.0), ratio=1.0):
    part, logp, entropy = rows(reward, ratio)
    return difference(kind, recipe(name), recipe("grpo"), part, recipe(name).advantage(part), logp, entropy)


def test_disproportion_is_the_unexplained_share_of_squares():
    own, other = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert disproportion(own, other) == pytest.approx(0.5)  # the cosine is 1 / sqrt(2)
    assert disproportion(1.046 * other, other) == pytest.approx(0.0, abs=1e-12)
    assert disproportion(-other, other) == 1.0  # only positive multiples count
    assert disproportion(own, 0 * other) == 1.0 and disproportion(0 * own, other) == 0.0


def test_leave_one_out_is_proportional_to_the_centred_reward_of_one_group():
    """RLOO's advantage of one group is 4/3 of the centred reward, and GRPO's is a multiple of it as well."""
    assert compared(ADVANTAGE, "rloo") == pytest.approx(0.0, abs=1e-6)


def test_the_plain_reward_is_not_proportional():
    """(1, 0, 0, 0) and a multiple of (3, -1, -1, -1) have the cosine 3 / sqrt(12), so 1 - 9/12 is unexplained."""
    assert compared(ADVANTAGE, "reinforce") == pytest.approx(0.25, abs=1e-6)


def test_a_higher_bound_acts_only_between_the_two_bounds():
    """DAPO clips at 1.28 and GRPO at 1.2. At 1.25 the winner keeps its gradient in DAPO alone: its advantage of 3 is
    9 of 12 squares, which the clipped gradient (0, -1, -1, -1) does not explain."""
    assert compared(SURROGATE, "dapo", ratio=1.1) == pytest.approx(0.0, abs=1e-6)
    assert compared(SURROGATE, "dapo", ratio=1.25) == pytest.approx(0.75, abs=1e-6)


def test_other_aggregations_count_in_the_loss_alone():
    """Rows of equal lengths: the fixed length of Dr. GRPO and the missing standard deviation are factors."""
    assert compared(LOSS, "dr_grpo") == pytest.approx(0.0, abs=1e-6)
    part, logp, entropy = rows((1.0, 0.0, 0.0, 0.0))
    mask = torch.tensor([[True, True], [False, True], [False, True], [False, True]])
    shorter = part.with_fields(mask=mask)
    own, grpo = recipe("dr_grpo"), recipe("grpo")
    advantage = own.advantage(shorter)
    found = difference(LOSS, own, grpo, shorter, advantage, logp, entropy)
    # per decision (3, 3, -1, -1, -1) against (1.5, 1.5, -1, -1, -1): 12 of sqrt(21 * 7.5)
    assert found == pytest.approx(1 - 144 / (21 * 7.5), abs=1e-6)
    again = difference(SURROGATE, own, grpo, shorter, advantage, logp, entropy)
    assert again == pytest.approx(0.0, abs=1e-6)


def test_tools_and_branches_are_read_from_the_metrics():
    called, branched = Mechanism(CALLS, "ppo"), Mechanism(BRANCHES, "grpo")
    for share in (0.0, 0.25):
        called.observe_metrics({"rollout/calls": share})
        branched.observe_metrics({"rollout/continued": 0.0})
    assert called.to_dict() == {"kind": CALLS, "share": 0.5, "difference": 0.125, "reason": ""}
    assert branched.to_dict()["reason"] == "no rollout branches" and branched.share == 0.0


def test_a_mechanism_acts_in_a_tenth_of_the_updates():
    assert Mechanism(ADVANTAGE, "grpo", [0.5, *[0.0] * 9]).to_dict()["reason"] == ""
    rare = Mechanism(ADVANTAGE, "grpo", [0.5, *[0.0] * 10]).to_dict()
    assert rare["reason"] == "its advantage is proportional to the advantage of grpo"


@pytest.mark.parametrize(("name", "acts"), [("reinforce", True), ("grpo", False)])
def test_updates_are_observed(name, acts):
    mechanism = observed_on_one_turn(name)
    assert len(mechanism.differences) == 2 and (mechanism.share == 1.0) == acts
