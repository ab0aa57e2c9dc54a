"""Tests of bundle export for every kind of policy: the same chunks as in torch, or a refusal with the reason."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
pytest.importorskip("onnxscript", reason="needs robopolicy[onnx]")
from export_rules import check_plays_what_evaluation_plays, translations_read_once
from tiny_policies import EXPORTED, REFUSED, observed, small

from robopolicy.deploy.bundle import TOLERANCE
from robopolicy.deploy.export import export_bundle
from robopolicy.errors import UserError
from robopolicy.interop.onnx import open_onnx
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.spec import TaskMetadata

pytestmark = pytest.mark.usefixtures(translations_read_once.__name__)
SLOW = pytest.mark.slow
QUICK = ("flow", "ddpm", "gaussian-gru", "latent (DSRL)", "composed-convex")


@pytest.mark.parametrize("kind", [kind if kind in QUICK else pytest.param(kind, marks=SLOW) for kind in EXPORTED])
def test_bundle_returns_the_chunks_of_evaluation(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check_plays_what_evaluation_plays(EXPORTED[kind](), tmp_path)


@pytest.mark.parametrize(
    "kind", ["latent (DSRL)", pytest.param("ddim", marks=SLOW), pytest.param("edm-heun", marks=SLOW)]
)
def test_bundle_continues_a_prefix_as_torch_does(kind: str, tmp_path: Path) -> None:
    policy = EXPORTED[kind]().eval()
    manifest = export_bundle(
        policy, tmp_path / "b", task_metadata=TaskMetadata("none/none"), obs=observed(policy), rtc=True
    )
    assert manifest.takes_prefix and manifest.parity <= TOLERANCE


@pytest.mark.parametrize("kind", list(REFUSED))
def test_unsupported_policies_are_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    make, reason = REFUSED[kind]
    policy = make().eval()
    with pytest.raises(UserError, match=reason) as caught:
        export_bundle(policy, tmp_path / "b", task_metadata=TaskMetadata("none/none"), obs=observed(policy))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_differing_graph_is_refused_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small("flow")
    monkeypatch.setattr("robopolicy.deploy.export.golden_error", lambda *_: 2e-4)
    with pytest.raises(UserError, match=r"differs from torch by 0\.0002 in normalised units"):
        export_bundle(policy, tmp_path / "b", task_metadata=TaskMetadata("none/none"), obs=observed(policy))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["ddpm", "gaussian-gru"])
def test_the_graph_of_a_bundle_opens_as_a_policy(kind: str, tmp_path: Path) -> None:
    policy = EXPORTED[kind]().eval()
    obs = observed(policy)
    export_bundle(policy, tmp_path / "b", task_metadata=TaskMetadata("none/none"), obs=obs)
    opened = open_onnx(tmp_path / "b" / "policy.onnx")
    assert opened.spec == policy.spec and opened.nfe == policy.nfe
    if kind == "ddpm":
        assert opened.noise_shape == (12, 2)  # the initial noise and the noise of each of the three steps
        streams = [PerRowGenerator(range(3), [0] * 3) for _ in range(2)]
        chunks = [p.act(obs, deterministic=True, generator=g) for p, g in zip((policy, opened), streams, strict=True)]
    else:
        chunks = [p.act(obs, deterministic=True) for p in (policy, opened)]
        torch.testing.assert_close(opened.next_hidden(obs), policy.next_hidden(obs).detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(chunks[0], chunks[1], rtol=0, atol=1e-4)
