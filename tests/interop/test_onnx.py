"""Tests of ONNX files as policies: chunks equal the graph's output, and refusals state expected and found values."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robopolicy.deploy.graph import metadata
from robopolicy.errors import UserError
from robopolicy.interop.onnx import OnnxPolicy, open_onnx
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

onnx = pytest.importorskip("onnx", reason="needs robopolicy[onnx]")
pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
from onnx import TensorProto, helper  # noqa: E402
from onnx_files import WEIGHT, noisy, write  # noqa: E402

SPEC = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, action_horizon=4)
OBS = {"state": torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0))}


def expected(noise: torch.Tensor) -> torch.Tensor:
    return (OBS["state"][:, 0] @ torch.from_numpy(WEIGHT)).view(-1, 4, 2) + noise


@pytest.mark.parametrize("batch", ["B", 1, 2])
def test_graph_with_noise_input_decodes_like_its_network(tmp_path: Path, batch: Any) -> None:
    policy = open_onnx(noisy(tmp_path / "p.onnx", batch))
    assert policy.spec == SPEC and policy.is_steerable
    noise = torch.randn(5, 4, 2)
    torch.testing.assert_close(policy.decode(OBS, noise), expected(noise), rtol=1e-6, atol=1e-6)
    chunks = [policy.act(OBS, generator=PerRowGenerator(range(5), [0] * 5)) for _ in range(2)]
    assert torch.equal(*chunks)
    assert policy.meter.calls == {"B": 3, 1: 15, 2: 9}[batch] and policy.meter.latency > 0


def test_inputs_are_renamed_and_the_action_horizon_is_optional(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["obs", "weight"], ["chunk"])]
    file = write(tmp_path / "p.onnx", {"obs": [1, 6]}, nodes, [1, 2], weight=WEIGHT[:, :2])
    policy = open_onnx(file, rename={"state": "obs", "chunk": "chunk"})
    assert policy.spec == PolicySpec({"state": (6,)}, 2) and not policy.is_steerable
    torch.testing.assert_close(policy.act(OBS)[:, 0], OBS["state"][:, 0] @ torch.from_numpy(WEIGHT[:, :2]))
    with pytest.raises(UserError, match="'onnx' takes none"):
        LatentPolicy.from_base(policy, NoiseSpace(), STEERING_ACTOR)


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_images_are_passed_as_uint8_or_scaled_to_zero_one(tmp_path: Path, kind: type) -> None:
    nodes = [
        helper.make_node("Cast", ["image.front"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["float"], ["chunk"], axes=[2, 3, 4], keepdims=0),
    ]
    types = {"image.front": TensorProto.UINT8} if kind is np.uint8 else {}
    file = write(tmp_path / "p.onnx", {"image.front": ["B", 2, 3, 4, 4]}, nodes, ["B", 2], types=types)
    policy = open_onnx(file)
    assert policy.spec == PolicySpec({"image.front": (3, 4, 4)}, 2, obs_horizon=2)
    image = torch.zeros(3, 2, 3, 4, 4, dtype=torch.uint8)
    image[:, 1] = 255
    largest = 255.0 if kind is np.uint8 else 1.0
    assert policy.act({"image.front": image}).tolist() == [[[0.0, largest]]] * 3


def test_metadata_specifies_open_sizes_of_the_graph(tmp_path: Path) -> None:
    spec = PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=3)
    policy = open_onnx(noisy(tmp_path / "p.onnx", metadata=metadata(spec, network_calls=7)))
    assert policy.spec == spec and policy.nfe == 7
    assert open_onnx(tmp_path / "p.onnx", action_horizon=1).spec.action_horizon == 1
    nodes = [helper.make_node("Identity", ["state"], ["chunk"])]
    write(tmp_path / "open.onnx", {"state": ["B", "D"]}, nodes, ["B", "D"])
    with pytest.raises(UserError, match=r"Input 'state' of .* has open sizes \['D'\]; describe the policy"):
        open_onnx(tmp_path / "open.onnx")
    assert open_onnx(tmp_path / "open.onnx", spec=PolicySpec({"state": (2,)}, 2)).act(
        {"state": torch.ones(1, 1, 2)}
    ).shape == (1, 1, 2)


def test_external_weight_files_are_included(tmp_path: Path) -> None:
    model = onnx.load(noisy(tmp_path / "p.onnx"))
    onnx.save(model, tmp_path / "x.onnx", save_as_external_data=True, location="x.data", size_threshold=0)
    policy = open_onnx(tmp_path / "x.onnx")
    (tmp_path / "x.data").unlink()
    noise = torch.randn(5, 4, 2)
    torch.testing.assert_close(policy.decode(OBS, noise), expected(noise), rtol=1e-6, atol=1e-6)


def test_checkpoint_contains_the_graph(tmp_path: Path) -> None:
    file = noisy(tmp_path / "p.onnx")
    policy = LatentPolicy.from_base(open_onnx(file), NoiseSpace("repeat"), STEERING_ACTOR)
    save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample=fitted(policy))
    file.unlink()
    assert verify_checkpoint(tmp_path / "c").ok
    loaded, manifest = load_policy(tmp_path / "c")
    assert isinstance(loaded, LatentPolicy) and isinstance(loaded.base, OnnxPolicy)
    noise = torch.randn(5, 4, 2)
    assert torch.equal(copy.deepcopy(loaded.base).decode(OBS, noise), policy.base.decode(OBS, noise))
    assert manifest.files["model.safetensors"]


def fitted(policy: LatentPolicy) -> dict[str, torch.Tensor]:
    policy.update_stats(OBS)
    return OBS


def test_files_that_are_no_policy_are_refused(tmp_path: Path) -> None:
    good = noisy(tmp_path / "p.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not onnx")
    refusals = {
        "cannot be read": lambda: open_onnx(tmp_path / "absent.onnx"),
        "not an ONNX file": lambda: open_onnx(tmp_path / "bad.onnx"),
        "Unknown input 'obs'": lambda: open_onnx(good, rename={"state": "obs"}),
        "Unknown output 'actions'": lambda: open_onnx(good, rename={"chunk": "actions"}),
        r"has shape \(B, 6\), expected \(B, 1, 7\)": lambda: open_onnx(good, spec=PolicySpec({"state": (7,)}, 2, 4)),
        r"Input 'noise' .* has shape \(B, 4, 2\), expected \(B, 4, 3\)": lambda: open_onnx(
            good, spec=PolicySpec({"state": (6,)}, 3, 4)
        ),
        "has the inputs noise, state, expected pose, state": lambda: open_onnx(
            good, spec=PolicySpec({"state": (6,), "pose": (1,)}, 2, 4)
        ),
        "action_horizon=5 is too many": lambda: open_onnx(good, action_horizon=5),
        "does not describe a policy": lambda: open_onnx(
            noisy(tmp_path / "m.onnx", metadata={"robopolicy": '{"horizon": 3}'})
        ),
        "is not JSON": lambda: open_onnx(noisy(tmp_path / "j.onnx", metadata={"robopolicy": "{"})),
    }
    for message, call in refusals.items():
        with pytest.raises(UserError, match=message) as refusal:
            call()
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("state", "output", "message"),
    [
        ([1, 6], [1, 5000, 2], "horizons may be at most 4096, got 5000 and 1"),
        ([1, 5000, 6], [1, 4, 2], "horizons may be at most 4096, got 4 and 5000"),
        ([1, 6], [1, 0], "action_dim must be at least 1"),
    ],
)
def test_graphs_of_impossible_sizes_are_refused(
    state: list[int], output: list[int], message: str, tmp_path: Path
) -> None:
    nodes = [helper.make_node("ConstantOfShape", ["sizes"], ["chunk"])]
    file = write(tmp_path / "p.onnx", {"state": state}, nodes, output, sizes=np.array(output))
    with pytest.raises(UserError, match=f"does not describe a policy: .*{message}"):
        open_onnx(file)


@pytest.mark.parametrize("kind", ["UINT8", "INT32", "INT64"])
def test_integer_inputs_are_refused_because_they_cut_fractions_off(kind: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["state"], ["chunk"], to=TensorProto.FLOAT)]
    types = {"state": getattr(TensorProto, kind)}
    file = write(tmp_path / "p.onnx", {"state": ["B", 6]}, nodes, ["B", 6], types=types)
    with pytest.raises(UserError, match=rf"'state' of .* takes tensor\({kind.lower()}\), expected tensor\(float\) or"):
        open_onnx(file)


def test_integer_outputs_are_refused(tmp_path: Path) -> None:
    nodes = [helper.make_node("Cast", ["state"], ["chunk"], to=TensorProto.INT64)]
    file = write(tmp_path / "p.onnx", {"state": ["B", 6]}, nodes, ["B", 6], types={"chunk": TensorProto.INT64})
    with pytest.raises(UserError, match=r"Output 'chunk' of .* is tensor\(int64\), expected tensor\(float\) or"):
        open_onnx(file)


def test_missing_packages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(UserError, match=r"needs the package 'onnx'; run: pip install 'robopolicy\[onnx\]'"):
        open_onnx(tmp_path / "p.onnx")
