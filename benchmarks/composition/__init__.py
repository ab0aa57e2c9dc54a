"""Composed policies against their parents: weights searched on some episodes, reported on others."""
