"""Chains: what explores around a generative head while it is fine-tuned, and scores what was explored."""
