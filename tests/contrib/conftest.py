"""Decisions in every layout, and what runs of the point mass need."""

from batches import decisions, shift
from point_mass_fixtures import clone, demonstrations, make_policy

__all__ = ["clone", "decisions", "demonstrations", "make_policy", "shift"]
