"""The rules of the product's families over what the theme known_dynamics adds to them."""

import pytest
from theme_rules import AlgorithmRules, ConfigRules, PresetRules, SourceRules

pytest.importorskip("clarabel")


class TestRules(AlgorithmRules, ConfigRules, PresetRules, SourceRules):
    theme = "known_dynamics"
