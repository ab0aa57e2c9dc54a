"""Behaviour trees: expressions over observations, nodes that tick in batches, and changes for a search."""
