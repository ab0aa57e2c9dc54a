"""The rules of the product's families over what the theme drone_volleyball adds to them."""

from theme_rules import PresetRules


class TestRules(PresetRules):
    theme = "drone_volleyball"
