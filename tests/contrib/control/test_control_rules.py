"""The rules of the product's families over what the theme control adds to them."""

from theme_rules import (
    AlgorithmRules,
    BackboneRules,
    ConfigRules,
    HeadRules,
    PolicyRules,
    RecipeRules,
    SourceRules,
)


class TestRules(AlgorithmRules, BackboneRules, ConfigRules, HeadRules, PolicyRules, RecipeRules, SourceRules):
    theme = "control"
