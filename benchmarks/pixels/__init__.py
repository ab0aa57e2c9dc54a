"""Fine-tuning from camera images."""
