"""Fixtures of the transport tests."""

from networks import network

__all__ = ["network"]
