"""What all tests of this folder may ask for."""

from small_policies import folder, policy

__all__ = ["folder", "policy"]
