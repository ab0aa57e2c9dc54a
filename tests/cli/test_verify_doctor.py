"""Tests of `robopolicy verify` and `robopolicy doctor`."""

import json

import pytest
import torch

from robopolicy.cli import doctor
from robopolicy.cli.main import main
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.training.checkpoint import save_checkpoint


@pytest.fixture
def checkpoint(tmp_path):
    policy = GaussianPolicy(GaussianConfig(), PolicySpec({"state": (3,)}, 2))
    obs = {"state": torch.randn(5, 1, 3)}
    policy.update_stats(obs)
    path = tmp_path / "best"
    save_checkpoint(path, policy, task="toy/point_mass", obs_sample=obs)
    return path


def test_verify_reports_the_error_and_the_policy(checkpoint, capsys):
    assert main(["verify", str(checkpoint)]) == 0
    text = capsys.readouterr().out
    assert "verified" in text
    assert "policy gaussian, task toy/point_mass" in text


def test_verify_accepts_the_current_folder_and_refuses_the_root(checkpoint, capsys, monkeypatch):
    monkeypatch.chdir(checkpoint)
    assert main(["verify", "."]) == 0
    assert main(["verify", "/"]) == 2
    assert "/ is not a checkpoint" in capsys.readouterr().err


def test_verify_fails_with_1_when_actions_differ(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(GaussianPolicy, "act", lambda self, obs, **_: torch.zeros(4, 1, 2))
    assert main(["verify", str(checkpoint), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"]
    assert report["max_error"] > 0


def test_verify_shows_changed_versions(checkpoint, capsys):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert main(["verify", str(checkpoint)]) == 0
    assert "torch has changed since: 1.0 -> " in capsys.readouterr().out


def test_verify_reports_a_corrupted_file_in_one_line(checkpoint, capsys):
    (checkpoint / "golden.safetensors").write_bytes(b"")
    assert main(["verify", str(checkpoint)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "golden.safetensors is corrupted or truncated" in captured.err


def test_doctor_reports_core_machine_and_optional_packages(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(finding["ok"] for finding in report["core"])
    assert {"gpu", "rendering", "cpu cores"} <= {finding["name"] for finding in report["machine"]}
    assert {"envpool", "rclpy", "lerobot", "wandb"} <= {finding["name"] for finding in report["optional"]}


def test_doctor_reports_what_a_missing_package_enables(capsys, monkeypatch):
    monkeypatch.setattr(doctor.util, "find_spec", lambda name: None)
    monkeypatch.setenv("MUJOCO_GL", "nonsense")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  --  envpool") and "pip install 'robopolicy[envpool]'" in line for line in lines)
    assert any(line.startswith("  --  rendering") and "camera observations and videos" in line for line in lines)
