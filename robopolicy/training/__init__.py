"""Training loop, checkpoints, resume and logging."""
