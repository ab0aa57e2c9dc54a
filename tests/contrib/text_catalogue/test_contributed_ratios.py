"""Log-ratios at every level and with every reduction, bounds, hierarchy, importance weights."""

from robopolicy.core.ratios import Hierarchy
from robopolicy.recipe_files import read_recipe


def test_budgets_of_a_hierarchy_exceed_what_a_decision_may_deviate():
    """FiberPO (Li et al. 2026): as in the recipe."""
    default = Hierarchy()
    assert default == Hierarchy(**read_recipe("fiberpo")["estimator"]["hierarchy"])
    assert default.residual <= 0.2 * default.budget_down < 0.2 * default.budget_up
