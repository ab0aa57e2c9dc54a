"""Test of a recipe that differs from GRPO only on several turns."""

import pytest

pytest.importorskip("transformers")

from observed_recipes import observed_on_one_turn


def test_the_advantage_of_hgpo_is_a_multiple_of_grpos_on_one_turn():
    mechanism = observed_on_one_turn("hgpo")
    assert max(mechanism.differences) < 1e-6
    assert mechanism.to_dict()["reason"] == "its advantage is proportional to the advantage of grpo"
