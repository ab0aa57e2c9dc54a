"""The shared rules of each component family, applied to the components of the theme text_diffusion."""

from theme_rules import ConfigRules, PolicyRules, RecipeRules


class TestRules(ConfigRules, PolicyRules, RecipeRules):
    theme = "text_diffusion"
