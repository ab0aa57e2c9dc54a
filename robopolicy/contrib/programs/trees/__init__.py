"""Behavior trees: expressions over observations, nodes that tick in batches, and random changes for a search."""
