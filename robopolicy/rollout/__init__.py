"""Samplers of simulator data: on-policy rollouts, replay and groups of episodes."""
