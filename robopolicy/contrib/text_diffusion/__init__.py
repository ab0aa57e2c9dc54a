"""Masked-diffusion text policies and their recipes."""
