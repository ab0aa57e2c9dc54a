"""Test of the default budgets of a ratio hierarchy."""

from robopolicy.core.ratios import Hierarchy
from robopolicy.recipe_files import read_recipe


def test_hierarchy_budgets_exceed_the_residual_of_a_decision():
    """FiberPO (Li et al. 2026): the defaults equal the recipe."""
    default = Hierarchy()
    assert default == Hierarchy(**read_recipe("fiberpo")["estimator"]["hierarchy"])
    assert default.residual <= 0.2 * default.budget_down < 0.2 * default.budget_up
