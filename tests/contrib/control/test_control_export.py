"""Tests of exported heads and backbones of the control theme: bundles return the same chunks as torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
from export_rules import check_plays_what_evaluation_plays, translations_read_once
from tiny_policies import head, small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures(translations_read_once.__name__)]
EXPORTED: dict[str, Callable[[], Any]] = {
    "flow-modular": lambda: small("flow", backbone="modular", backbone_options={"modules": 2, "context_width": 4}),
    "sequence": lambda: head("sequence", hidden=(8, 8)),
    "swaddled": lambda: head("swaddled", hidden=(8,)),
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_bundle_returns_the_chunks_of_evaluation(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check_plays_what_evaluation_plays(EXPORTED[kind](), tmp_path)
