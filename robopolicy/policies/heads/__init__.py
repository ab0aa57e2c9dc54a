"""Heads: the networks that turn an observation into an action chunk, one distribution each."""
