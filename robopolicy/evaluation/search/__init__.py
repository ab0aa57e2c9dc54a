"""Weights of composed policies by experiment: methods with a stated budget, a record to resume from, a fair trial."""
