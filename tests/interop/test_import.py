"""Tests of `robopolicy import`: it converts every kind of policy to a checkpoint that all commands read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from robopolicy.cli.main import main
from robopolicy.training.checkpoint import load_policy

DSRL = ["budget.updates=4", "evaluation.episodes=2", "evaluation.every=4", "checkpoint_every=4", "sim.num_envs=4"]
DSRL += ["replay.learning_starts=40", "algorithm.batch_size=16", "algorithm.utd=0.5", "algorithm.actor.hidden=[16]"]
DSRL += ["algorithm.critic.hidden=[16]"]


def test_remote_policy_is_imported_evaluated_steered_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("websockets", reason="needs robopolicy[remote]")
    pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
    from policy_server import serving

    with serving() as served:
        base = str(tmp_path / "base")
        assert main(["import", "remote", served.url, "--task", "point_mass", "--out", base, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["takes_noise"] is True
        assert main(["eval", base, "--episodes", "2", "--video", "0", "--json", "--out", str(tmp_path / "e")]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert "latency_ms" in json.dumps(summary)
        assert main(["train", "algorithm=dsrl_sac", f"init_from={base}", *DSRL, f"out={tmp_path}", "name=steered"]) == 0
        steered = tmp_path / "steered" / "checkpoints" / "last"
        assert main(["verify", str(steered)]) == 0
        policy, manifest = load_policy(steered)
        assert policy.name == "latent" and manifest.config["base"]["config"]["url"] == served.url
        before, after = load_file(tmp_path / "base" / "model.safetensors"), load_file(steered / "model.safetensors")
        for key, value in before.items():
            assert torch.equal(after[f"base.{key}"], value)


def test_steering_leaves_an_onnx_policy_bitwise_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="needs robopolicy[onnx]")
    pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
    from onnx_files import noisy

    file = noisy(tmp_path / "p.onnx", state="obs")
    base = str(tmp_path / "base")
    words = ["import", "onnx", str(file), "--task", "point_mass", "--rename", "state=obs", "--action-horizon", "2"]
    assert main([*words, "--out", base]) == 0
    file.unlink()
    assert main(["train", "algorithm=dsrl_na", f"init_from={base}", *DSRL, f"out={tmp_path}", "name=steered"]) == 0
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(tmp_path / "steered" / "checkpoints" / "last" / "model.safetensors")
    assert before["graph"].numel() > 100
    for key, value in before.items():
        assert torch.equal(after[f"base.{key}"], value)


def test_sb3_model_is_imported_and_collects_demonstrations(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="needs robopolicy[sb3]")
    from robopolicy.interop.stable_baselines3 import SimVecEnv
    from robopolicy.sim.registry import SimOptions, make_sim

    sb3.PPO("MlpPolicy", SimVecEnv(make_sim("toy/point_mass", SimOptions(num_envs=2)))).save(tmp_path / "m.zip")
    base = str(tmp_path / "base")
    assert main(["import", "sb3", str(tmp_path / "m.zip"), "--task", "point_mass", "--out", base]) == 0
    collected = ["--policy", base, "--keep-failures", "--episodes", "2", "--out", str(tmp_path / "data")]
    assert main(["collect", "point_mass", *collected]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["onx", "p"], "Unknown kind of policy 'onx'. Did you mean 'onnx'"),
        (["sb3", "absent.zip"], "absent.zip cannot be read"),
        (["remote", "ws://127.0.0.1:1"], "cannot be reached"),
        (["remote", "ws://127.0.0.1:1", "--rename", "state=obs"], "takes no --rename"),
        (["onnx", "p.onnx", "--rename", "state"], "--rename takes KEY=NAME"),
        (["onnx", "p.onnx", "--action-horizon", "0"], "--action-horizon must be at least 1, got 0"),
        (["sb3", "absent.zip", "--action-horizon", "2"], "takes no --action-horizon"),
        (["sb3", "absent.zip", "--instruction", "lift it"], "takes no --instruction"),
        (["rsl_rl", "model.pt"], "agent.yaml does not exist; pass it by --config"),
    ],
)
def test_invalid_imports_print_one_line_and_write_no_files(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in {"remote": ["websockets", "msgpack"], "onnx": ["onnx"]}.get(words[0], []):
        if "--rename" not in words:
            pytest.importorskip(package, reason=f"needs robopolicy[{words[0]}]")
    assert main(["import", *words, "--task", "point_mass", "--out", str(tmp_path / "c")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_graphs_that_mismatch_the_task_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx", reason="needs robopolicy[onnx]")
    pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
    from onnx_files import WEIGHT, write

    multiply = onnx.helper.make_node("MatMul", ["state", "weight"], ["chunk"])
    brightest = onnx.helper.make_node("ReduceMax", ["image.roof"], ["chunk"], axes=[2, 3], keepdims=0)
    rename = onnx.helper.make_node("Identity", ["pose"], ["chunk"])
    graphs = {
        "outputs 3 action dimensions, but toy/point_mass takes 2": ({"state": ["B", 6]}, multiply, WEIGHT[:, :3]),
        "Unknown camera 'roof' of task manipulation/lift": ({"image.roof": ["B", 3, 8, 8]}, brightest, WEIGHT),
        "needs observation 'pose', but toy/point_mass provides state": ({"pose": ["B", 3]}, rename, WEIGHT),
    }
    for message, (inputs, node, weight) in graphs.items():
        file = write(tmp_path / "p.onnx", inputs, [node], ["B", 3], weight=weight)
        task = "lift" if "lift" in message else "point_mass"
        assert main(["import", "onnx", str(file), "--task", task, "--out", str(tmp_path / "c")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "c").exists()


def test_policies_of_another_task_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="needs robopolicy[sb3]")
    sb3.PPO("MlpPolicy", "Pendulum-v1", device="cpu").save(tmp_path / "m.zip")
    words = ["--task", "point_mass", "--out", str(tmp_path / "c")]
    assert main(["import", "sb3", str(tmp_path / "m.zip"), *words]) == 2
    assert "expects observation 'state' of shape (3,), but toy/point_mass provides (6,)" in capsys.readouterr().err
