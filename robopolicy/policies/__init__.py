"""Policies behind one contract (`base.Policy`)."""
