"""Composed policies compared with their parents; weights are searched and evaluated on different episodes."""
