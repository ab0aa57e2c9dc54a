"""Skill discovery, messages between agents and observations of variable sets of entities."""
