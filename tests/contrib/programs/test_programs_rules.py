"""Shared rules for the entries of the theme programs."""

from theme_rules import ConfigRules, PolicyRules


class TestRules(ConfigRules, PolicyRules):
    theme = "programs"
