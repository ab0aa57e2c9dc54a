"""The rules of the product's families over what the theme perception adds to them."""

from theme_rules import ConfigRules


class TestRules(ConfigRules):
    theme = "perception"
