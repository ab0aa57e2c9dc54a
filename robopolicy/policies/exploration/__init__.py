"""Exploration: stochastic samplers around a generative head for fine-tuning, and the likelihood of their samples."""
