"""Size of the first step of on-policy fine-tuners."""
