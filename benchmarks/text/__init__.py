"""Every online recipe of `configs/text` from the same imitated checkpoints, at equal generated tokens."""
