"""Every fine-tuner from the same pretrained checkpoints, at equal environment steps."""
