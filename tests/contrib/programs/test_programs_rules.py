"""The rules of the product's families over what the theme programs adds to them."""

from theme_rules import ConfigRules, PolicyRules


class TestRules(ConfigRules, PolicyRules):
    theme = "programs"
