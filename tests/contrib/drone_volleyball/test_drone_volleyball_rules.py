"""Shared rules for the entries of the theme drone_volleyball."""

from theme_rules import PresetRules


class TestRules(PresetRules):
    theme = "drone_volleyball"
