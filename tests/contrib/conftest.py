"""What all tests of contrib may ask for."""

from point_mass_data import demonstrations, make_policy

__all__ = ["demonstrations", "make_policy"]
