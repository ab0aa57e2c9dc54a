"""Fixture of a small text policy."""

import pytest

pytest.importorskip("transformers")

from text_fixtures import policy

__all__ = ["policy"]
