"""Every online recipe from the same imitated checkpoints, at equal generated tokens."""
