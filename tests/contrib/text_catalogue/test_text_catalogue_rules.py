"""The rules of the product's families over what the theme text_catalogue adds to them."""

from theme_rules import RecipeRules


class TestRules(RecipeRules):
    theme = "text_catalogue"
    unmasked = ("oppo",)  # needs an encoder
