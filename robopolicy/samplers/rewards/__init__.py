"""P15, rewards composed left to right: each part maps the reward so far, and what the world measured, to the next."""
