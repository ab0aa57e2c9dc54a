"""Fine-tuning in mjlab."""
