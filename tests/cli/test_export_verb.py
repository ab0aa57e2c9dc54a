"""Tests of `robopolicy export`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.deploy.bundle import open_bundle
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.training.checkpoint import save_checkpoint

pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
pytest.importorskip("onnxscript", reason="needs robopolicy[onnx]")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    raw = {"normalization": "identity", "action_normalization": "identity"}
    policy = FlowPolicy(FlowConfig(hidden=(8,), steps=2, **raw), PolicySpec({"state": (3,)}, 2, 4, 2))  # type: ignore[arg-type]
    save_checkpoint(tmp_path / "best", policy, task="toy/gone", obs_sample={"state": torch.randn(5, 1, 3)})
    return tmp_path / "best"


def test_export_reports_parity_and_a_task_that_is_not_installed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "bundle")]) == 0
    text, notes = capsys.readouterr()
    assert "tracing 'flow' with 2 network calls per chunk" in notes
    assert "parity with torch: largest error" in text and "does not continue given actions" in text
    assert "are omitted: Unknown task 'toy/gone'" in text
    content = json.loads((tmp_path / "bundle" / "bundle.json").read_text())
    assert content["parity"] <= 1e-4 and content["checkpoint"] and content["noise_shape"] == [4, 2]


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_and_nothing_is_written(
    package: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["export", str(checkpoint), "--out", str(tmp_path / "bundle")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and f"package '{package}'; run: pip install 'robopolicy[onnx]'" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_overwrite_replaces_a_bundle(checkpoint: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    words = ["export", str(checkpoint), "--out", str(tmp_path / "bundle")]
    assert main(words) == 0
    assert "bundle exists already" in refused(*words)
    assert main([*words, "--rtc", "--overwrite"]) == 0
    assert open_bundle(tmp_path / "bundle").takes_prefix


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{c}"], "required: --out"),
        (["{c}", "--out", "{t}/b", "--rct"], "Unknown argument '--rct'. Did you mean '--rtc'"),
        (["{t}/absent", "--out", "{t}/b"], "absent"),
        (["{c}", "--out", "{c}"], "exists and is not a bundle"),
    ],
)
def test_wrong_arguments_give_one_line_and_exit_code_2(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["export", *(word.format(c=checkpoint, t=tmp_path) for word in words)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and message in printed
