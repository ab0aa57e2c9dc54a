"""The shared rules of each family, applied to the control theme."""

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
