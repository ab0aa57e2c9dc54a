"""Constructors of the text tasks of this theme."""

from __future__ import annotations

from robopolicy.contrib.text_catalogue.critique import Critique
from robopolicy.contrib.text_catalogue.decompose import Decompose
from robopolicy.contrib.text_catalogue.nim import Nim
from robopolicy.contrib.text_catalogue.review import Review
from robopolicy.sim.registry import SimOptions
from robopolicy.text.sim import TextSim


def make_critique(options: SimOptions) -> TextSim:
    """Create the simulator of `text/critique`."""
    return TextSim(Critique(), options)


def make_decompose(options: SimOptions) -> TextSim:
    """Create the simulator of `text/decompose`."""
    return TextSim(Decompose(), options)


def make_nim(options: SimOptions) -> TextSim:
    """Create the simulator of `text/nim`."""
    return TextSim(Nim(), options)


def make_review(options: SimOptions) -> TextSim:
    """Create the simulator of `text/review`."""
    return TextSim(Review(), options)
