"""What all tests of this folder may ask for."""

from point_mass_data import demonstrations, make_policy

__all__ = ["demonstrations", "make_policy"]
