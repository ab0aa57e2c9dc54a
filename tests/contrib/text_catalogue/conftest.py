"""What all tests of this folder may ask for."""

from layouts import decisions, shift
from small_policies import folder, policy

__all__ = ["decisions", "folder", "policy", "shift"]
