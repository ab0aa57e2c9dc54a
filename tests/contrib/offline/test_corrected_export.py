"""Export test of a corrected policy: the bundle returns the same chunks as torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
from export_rules import check_plays_what_evaluation_plays, translations_read_once
from tiny_policies import small

from robopolicy.contrib.offline.corrected import Correction, DataModel, DataModelConfig, correct

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures(translations_read_once.__name__)]


def test_a_bundle_returns_the_actions_of_evaluation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = small("flow")
    corrected = correct(base, DataModel(DataModelConfig(hidden=(8,)), base), Correction())
    check_plays_what_evaluation_plays(corrected, tmp_path)
