"""Tests of bundles on a robot's computer: no torch, strict inputs, and refusal of damaged or changed files."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
pytest.importorskip("onnxscript", reason="needs robopolicy[onnx]")
from tiny_policies import observed, small

from robopolicy.cli.main import main
from robopolicy.deploy.bundle import Bundle, hash_files, open_bundle, prefix_weights, read_manifest, write_manifest
from robopolicy.deploy.export import export_bundle, read_task_metadata
from robopolicy.errors import UserError

OBS = {"goal": np.zeros((2, 2), np.float32), "state": np.ones((2, 3))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "flow"
    policy = small("flow", steps=3)
    export_bundle(policy, path, task_metadata=read_task_metadata("toy/point_mass"), obs=observed(policy), rtc=True)
    return path


@pytest.fixture
def bundle(folder: Path) -> Bundle:
    return open_bundle(folder, seed=0)


def test_a_copy_runs_in_a_process_without_torch_and_mujoco(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    program = (
        "import sys, numpy as np\n"
        "from robopolicy.deploy.bundle import open_bundle\n"
        "bundle = open_bundle(sys.argv[1], seed=3)\n"
        "chunk = bundle.chunk({'goal': np.zeros((2, 2)), 'state': np.ones((2, 3))})\n"
        "assert bundle.verify().ok and chunk.shape == (4, 2)\n"
        "print(chunk.tolist(), sorted({'torch', 'mujoco', 'onnx', 'safetensors'} & set(sys.modules)))\n"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "elsewhere")]
    printed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed == f"{open_bundle(folder, seed=3).chunk(OBS).tolist()} []\n"


def test_manifest_contains_the_task_metadata(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.task == "toy/point_mass" and manifest.control_dt is not None
    assert manifest.action_names == ("ax [m/s^2]", "ay [m/s^2]")
    assert manifest.action_low == (-1.0, -1.0) and manifest.action_high == (1.0, 1.0)
    assert manifest.noise_shape == (4, 2) and manifest.network_calls == 3


def test_command_line_verifies_a_bundle(
    folder: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "verified" in printed and "bundle of policy flow, task toy/point_mass, 3 network calls" in printed
    assert main(["verify", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert "A bundle runs on the CPU" in refused("verify", folder, "--device", "cpu")


def test_seeds_repeat_an_episode_and_other_seeds_differ(bundle: Bundle) -> None:
    first = [bundle.chunk(OBS) for _ in range(2)]
    assert not np.array_equal(first[0], first[1])
    bundle.reset()
    assert np.array_equal(bundle.chunk(OBS), first[0])
    bundle.reset(seed=1)
    assert not np.array_equal(bundle.chunk(OBS), first[0])
    assert np.array_equal(bundle.chunk(OBS, noise=np.ones((4, 2))), bundle.chunk(OBS, noise=np.ones((4, 2))))


def test_prefix_actions_are_returned_and_the_rest_adapts(bundle: Bundle) -> None:
    noise = np.random.default_rng(0).standard_normal((4, 2))
    plain = bundle.chunk(OBS, noise=noise)
    prefix = np.array([[0.3, 2.0], [0.1, -7.0]], np.float32)
    chunk = bundle.chunk(OBS, prefix, noise=noise)
    assert np.array_equal(chunk[:2], prefix) and not np.array_equal(chunk[2:], plain[2:])
    assert np.array_equal(bundle.chunk(OBS, prefix, weight=np.zeros(2), noise=noise), plain)


def test_soft_weights_hold_the_delay_and_fade_to_the_end() -> None:
    weights = prefix_weights(horizon=16, delay=3, action_horizon=6)
    assert weights.shape == (10,) and (weights[:3] == 1).all()
    assert (np.diff(weights[2:]) < 0).all() and 0 < weights[-1] < 0.05
    with pytest.raises(UserError, match="A delay of 11 does not fit chunks of 16 actions"):
        prefix_weights(16, 11, 6)


def test_mismatched_inputs_are_refused_in_one_line(bundle: Bundle) -> None:
    refused = {
        "needs the observation 'goal', got state": {"obs": {"state": OBS["state"]}},
        r"'state' must have shape \(2, 3\), found \(3,\)": {"obs": OBS | {"state": np.ones(3)}},
        "'state' must be numbers, found": {"obs": OBS | {"state": np.full((2, 3), "x")}},
        "'state' is not finite": {"obs": OBS | {"state": np.full((2, 3), np.nan)}},
        r"noise must be finite numbers of shape \(4, 2\), found shape \(4, 3\)": {"noise": np.ones((4, 3))},
        "A prefix must have 1 to 3 actions, got 4": {"prefix": np.ones((4, 2))},
        r"prefix must be finite numbers of shape \(2, 2\)": {"prefix": np.full((2, 2), np.inf)},
        r"weights of a prefix must lie in \[0, 1\]": {"prefix": np.ones((1, 2)), "weight": np.array([2.0])},
    }
    for message, arguments in refused.items():
        with pytest.raises(UserError, match=message) as caught:
            bundle.chunk(**({"obs": OBS} | arguments))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


def test_closed_bundle_is_refused(bundle: Bundle) -> None:
    bundle.close()
    bundle.close()
    with pytest.raises(UserError, match="is closed; open it again"):
        bundle.chunk(OBS)


@pytest.mark.parametrize("name", ["policy.onnx", "golden.npz"])
def test_changed_files_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} is damaged or was changed"):
        open_bundle(copy)
    (copy / name).unlink()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        open_bundle(copy)


def test_a_changed_manifest_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    content = json.loads((copy / "bundle.json").read_text())
    (copy / "bundle.json").write_text(json.dumps(content | {"action_high": [9.0, 9.0]}))
    with pytest.raises(UserError, match=r"bundle\.json is damaged or was changed"):
        open_bundle(copy)
    (copy / "bundle.json").write_text(json.dumps(content | {"schema": 99}))
    with pytest.raises(UserError, match="has schema 99, expected 1"):
        open_bundle(copy)
    (copy / "bundle.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_bundle(copy)
    with pytest.raises(UserError, match="cannot be read"):
        open_bundle(tmp_path / "absent")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec": {"observation": 3}}, "does not describe a policy"),
        ({"spec": {"observation": {"state": [3], "memory": []}, "action_dim": 2}}, "must have one positive size"),
        ({"action_scale": ()}, "has 0 scales for 2 actions"),
        ({"action_scale": (0.0, 1.0)}, "scales that are not finite and positive"),
        ({"action_scale": (1.0, float("inf"))}, "scales that are not finite and positive"),
        ({"action_scale": (1.0, float("nan"))}, "scales that are not finite and positive"),
        ({"noise_shape": (7, 2)}, r"'noise' is \(1, 7, 2\) there and \(1, ., 2\) in the graph"),
        ({"noise_shape": ()}, "'noise' is absent there"),
        ({"takes_prefix": False}, "'prefix' is absent there"),
    ],
)
def test_a_manifest_of_another_graph_is_refused(folder: Path, tmp_path: Path, changes: Any, message: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    write_manifest(copy, replace(read_manifest(copy), **changes))
    with pytest.raises(UserError, match=message) as refusal:
        open_bundle(copy)
    assert "\n" not in str(refusal.value)


def rehashed(folder: Path, **changes: Any) -> Path:
    """Write the hashes of changed files and changed entries to the manifest."""
    write_manifest(folder, replace(read_manifest(folder), files=hash_files(folder), **changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": lambda value: value[..., :2]}, "does not belong to the graph"),
        ({"state": lambda value: value.astype(np.float64)}, "does not belong to the graph"),
        ({"state": lambda value: value[:1]}, "does not belong to the graph"),
        ({"chunk": lambda value: np.concatenate([value, value], 1)}, "does not belong to the graph"),
        ({"chunk": lambda value: value[0, 0, 0]}, "does not belong to the graph"),
        (
            dict.fromkeys(("goal", "state", "noise", "prefix", "prefix_weight", "chunk"), lambda value: value[:0]),
            "no ch",
        ),
    ],
    ids=["shape", "type", "rows", "chunk", "scalar", "empty"],
)
def test_golden_chunks_of_another_graph_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str, refused: Callable[..., str]
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    with np.load(copy / "golden.npz") as file:
        golden = {name: changes.get(name, np.asarray)(file[name]) for name in file.files}
    np.savez(copy / "golden.npz", **golden)
    assert message in refused("verify", rehashed(copy))


def test_a_scale_that_hides_errors_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    with np.load(copy / "golden.npz") as file:
        golden = dict(file)
    np.savez(copy / "golden.npz", **{**golden, "chunk": golden["chunk"] + 100})
    assert not open_bundle(rehashed(copy)).verify().ok
    with pytest.raises(UserError, match=r"has a scale of 1e\+30 for golden actions of at most 1"):
        open_bundle(rehashed(copy, action_scale=(1e30, 1e30))).verify()


@pytest.mark.parametrize(("name", "kind"), [("state", "INT32"), ("state", "INT64"), ("noise", "DOUBLE")])
def test_graphs_with_other_input_types_are_refused(folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    onnx = pytest.importorskip("onnx")
    model = onnx.load(copy / "policy.onnx")
    (entry,) = [entry for entry in model.graph.input if entry.name == name]
    entry.type.tensor_type.elem_type = getattr(onnx.TensorProto, kind)
    for node in model.graph.node:
        node.input[:] = ["float_input" if used == name else used for used in node.input]
    cast = onnx.helper.make_node("Cast", [name], ["float_input"], to=onnx.TensorProto.FLOAT)
    model.graph.node.insert(0, cast)
    onnx.save(model, copy / "policy.onnx")
    with pytest.raises(UserError, match=rf"'{name}' of .* is tensor\({kind.lower()}\), expected tensor\(float\)"):
        open_bundle(rehashed(copy))


@pytest.mark.parametrize("size", [0, 1000])
def test_truncated_graph_is_refused(folder: Path, tmp_path: Path, size: int) -> None:
    """The graph is refused even if the manifest has its hash, as after an export to a full disk."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "policy.onnx").write_bytes((copy / "policy.onnx").read_bytes()[:size])
    with pytest.raises(UserError, match="onnxruntime cannot run this graph"):
        open_bundle(rehashed(copy))
