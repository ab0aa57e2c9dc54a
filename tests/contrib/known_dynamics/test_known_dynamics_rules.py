"""Shared rules for the entries of the theme known_dynamics."""

import pytest
from theme_rules import AlgorithmRules, ConfigRules, PresetRules, SourceRules

pytest.importorskip("clarabel")


class TestRules(AlgorithmRules, ConfigRules, PresetRules, SourceRules):
    theme = "known_dynamics"
