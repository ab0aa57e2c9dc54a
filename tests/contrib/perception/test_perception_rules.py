"""Shared rules for the entries of the theme perception."""

from theme_rules import ConfigRules


class TestRules(ConfigRules):
    theme = "perception"
