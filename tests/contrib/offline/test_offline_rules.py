"""Shared rules for the entries of the theme offline."""

import pytest
from theme_rules import AlgorithmRules, ConfigRules, PolicyRules

pytest.importorskip("scipy")


class TestRules(AlgorithmRules, ConfigRules, PolicyRules):
    theme = "offline"
