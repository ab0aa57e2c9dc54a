"""Distillation of a policy into a smaller network whose architecture is searched for."""
