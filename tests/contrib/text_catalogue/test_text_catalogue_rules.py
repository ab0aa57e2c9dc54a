"""The shared rules of each component family, applied to the components of the theme text_catalogue."""

from theme_rules import RecipeRules


class TestRules(RecipeRules):
    theme = "text_catalogue"
    unmasked = ("oppo",)  # needs an encoder
