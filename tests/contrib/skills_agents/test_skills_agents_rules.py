"""The rules of the product's families over what the theme skills_agents adds to them."""

from theme_rules import ConfigRules


class TestRules(ConfigRules):
    theme = "skills_agents"
