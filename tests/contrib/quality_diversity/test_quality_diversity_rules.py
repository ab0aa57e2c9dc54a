"""The rules of the product's families over what the theme quality_diversity adds to them."""

import pytest
from theme_rules import AlgorithmRules, ConfigRules, PresetRules, SourceRules

pytest.importorskip("ribs")


class TestRules(AlgorithmRules, ConfigRules, PresetRules, SourceRules):
    theme = "quality_diversity"
