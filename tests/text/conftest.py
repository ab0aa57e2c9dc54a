"""Fixtures of a small text policy and of a folder with a pretrained model."""

import pytest

pytest.importorskip("transformers")

from text_fixtures import folder, policy

__all__ = ["folder", "policy"]
