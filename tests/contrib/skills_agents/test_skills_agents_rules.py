"""Shared rules for the entries of the theme skills_agents."""

from theme_rules import ConfigRules


class TestRules(ConfigRules):
    theme = "skills_agents"
