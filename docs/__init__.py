"""Guides, and the methods table with its generator."""
