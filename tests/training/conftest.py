"""Small policies and demonstrations of the point mass."""

from point_mass_fixtures import clone, demonstrations, make_policy

__all__ = ["clone", "demonstrations", "make_policy"]
