"""Training from scratch: every on-policy and off-policy learner against Stable-Baselines3's PPO and SAC."""
