"""GRPO compared with TRL's trainer: same model, prompts, group size and settings, one process each."""
