"""Published methods of reinforcement learning for control."""
