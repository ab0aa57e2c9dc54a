"""Wrappers: policies made of other policies, deployable as any other."""
