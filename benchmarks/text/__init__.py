"""Every online recipe from the same imitated checkpoints, at equal numbers of generated tokens."""
