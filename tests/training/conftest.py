"""Fixtures of small policies and of point-mass demonstrations."""

from point_mass_fixtures import clone, demonstrations, make_policy

__all__ = ["clone", "demonstrations", "make_policy"]
