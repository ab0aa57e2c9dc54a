"""The loop, checkpoints, resume and logging."""
