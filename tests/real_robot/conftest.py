"""Fixtures of the tests of transports."""

from networks import network

__all__ = ["network"]
