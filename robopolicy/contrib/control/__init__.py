"""Further reinforcement learning for control."""
