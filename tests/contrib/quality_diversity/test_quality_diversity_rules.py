"""Shared rules for the entries of the theme quality_diversity."""

import pytest
from theme_rules import AlgorithmRules, ConfigRules, PresetRules, SourceRules

pytest.importorskip("ribs")


class TestRules(AlgorithmRules, ConfigRules, PresetRules, SourceRules):
    theme = "quality_diversity"
