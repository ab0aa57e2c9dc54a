"""The rules of the product's families over what the theme offline adds to them."""

import pytest
from theme_rules import AlgorithmRules, ConfigRules, PolicyRules

pytest.importorskip("scipy")


class TestRules(AlgorithmRules, ConfigRules, PolicyRules):
    theme = "offline"
