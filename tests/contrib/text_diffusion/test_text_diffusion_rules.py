"""The rules of the product's families over what the theme text_diffusion adds to them."""

from theme_rules import ConfigRules, PolicyRules, RecipeRules


class TestRules(ConfigRules, PolicyRules, RecipeRules):
    theme = "text_diffusion"
