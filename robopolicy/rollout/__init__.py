"""Collectors of experience in simulators: on-policy rollouts, replay and groups."""
