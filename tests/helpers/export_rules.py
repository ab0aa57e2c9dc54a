"""Checks that an exported policy acts as in evaluation."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
pytest.importorskip("onnxscript", reason="needs robopolicy[onnx]")
from tiny_policies import observed
from torch.onnx._internal.exporter._registration import ONNXRegistry

from robopolicy.deploy.bundle import TOLERANCE, open_bundle
from robopolicy.deploy.export import export_bundle
from robopolicy.policies.base import Policy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.spec import TaskMetadata


@pytest.fixture(scope="module")
def translations_read_once() -> Iterator[None]:
    """Cache the exporter's translations, which it otherwise reads for every graph, slower than the export itself."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    yield
    patch.undo()


def check_plays_what_evaluation_plays(policy: Policy, folder: Path) -> None:
    """Chunks of a bundle equal the chunks of the policy within the tolerance at every decision."""
    policy.eval()
    obs = observed(policy)
    manifest = export_bundle(policy, folder / "b", task_metadata=TaskMetadata("none/none"), obs=obs)
    assert manifest.parity <= TOLERANCE
    bundle = open_bundle(folder / "b", seed=7)
    assert bundle.verify().ok
    memory = torch.zeros(1, 1, policy.spec.hidden_dim)
    for decision in range(2):
        seen = {key: value[decision : decision + 1] for key, value in obs.items()}
        if "memory" in seen:
            seen["memory"] = memory
            memory = policy.next_hidden(seen).detach()
        expected = policy.act(seen, deterministic=True, generator=PerRowGenerator([7], [decision]))[0]
        chunk = bundle.chunk({key: value[0].numpy() for key, value in seen.items() if key != "memory"})
        scale = torch.tensor(manifest.action_scale)
        torch.testing.assert_close(torch.from_numpy(chunk) / scale, expected / scale, rtol=0, atol=TOLERANCE)
