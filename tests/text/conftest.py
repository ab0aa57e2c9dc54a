"""A small text policy and a pretrained model in a folder."""

import pytest

pytest.importorskip("transformers")

from text_fixtures import folder, policy

__all__ = ["folder", "policy"]
