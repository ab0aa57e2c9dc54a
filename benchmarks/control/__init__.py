"""Control from scratch: every learner from rollouts and from replay against Stable-Baselines3's PPO and SAC."""
