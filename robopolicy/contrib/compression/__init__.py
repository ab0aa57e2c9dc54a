"""Distillation of a policy into a smaller network by architecture search."""
