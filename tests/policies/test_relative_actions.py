"""Tests of policies that predict differences of actions: exact inverse, statistics, and the whole path to a bundle."""

from pathlib import Path

import numpy as np
import pytest
import torch
from own_arm import JOINTS, demonstrations, record

from robopolicy.algorithms.iql import IQL, IQLConfig
from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.nested import describe
from robopolicy.policies.wrappers.relative_actions import (
    ActionRepresentation,
    RelativeActionConfig,
    RelativeActionPolicy,
    match_entries,
)
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.learner import encoded_actions
from robopolicy.training.manifest import read_manifest

SETTINGS = ["task=none", "algorithm=bc", "policy=gaussian", "policy.hidden=[32]", "chunk.horizon=4"]


@pytest.mark.parametrize("kind", ["delta", "relative"])
def test_decoding_inverts_encoding(kind: str) -> None:
    """Numbers with few binary digits, so that every sum is exact: the actions return to the last bit."""
    generator = torch.Generator().manual_seed(0)
    whole = lambda *shape: torch.randint(-512, 512, shape, generator=generator) / 64  # noqa: E731
    representation = ActionRepresentation(kind, "state", (0, 2), (1, 0))
    obs, chunk = {"state": whole(8, 3, 2)}, whole(8, 5, 3)
    assert torch.equal(representation.decode(obs, representation.encode(obs, chunk)), chunk)
    free = {"state": torch.randn(8, 3, 2, generator=generator)}, torch.randn(8, 5, 3, generator=generator)
    torch.testing.assert_close(representation.decode(free[0], representation.encode(*free)), free[1])


def test_differences_are_as_by_hand() -> None:
    """Actions 5, 6, 8 at the position 3 (an older one was 1), and a gripper that stays absolute."""
    obs = {"state": torch.tensor([[[1.0], [3.0]]])}
    chunk = torch.tensor([[[5.0, 0.1], [6.0, 0.2], [8.0, 0.3]]])
    for kind, expected in (("relative", [2.0, 3.0, 5.0]), ("delta", [2.0, 1.0, 2.0])):
        found = ActionRepresentation(kind, "state", (0,), (0,)).encode(obs, chunk)[0]
        assert found[:, 0].tolist() == expected
        assert torch.equal(found[:, 1], chunk[0, :, 1])


def test_statistics_are_of_the_differences_within_episodes() -> None:
    data = demonstrations(3)
    representation = ActionRepresentation("delta", "state", tuple(range(6)), tuple(range(6)))
    found = encoded_actions(representation, data, 2)
    state, action = data.arrays["state"].astype(float), data.arrays["action"].astype(float)
    inner = np.delete(np.arange(len(data)), data.ends - 1)  # frames with another one after them
    first, second = action - state, action[inner + 1] - action[inner]
    assert len(found) == len(first) + len(second)
    np.testing.assert_allclose(sorted(found[:, 0]), sorted([*first[:, 0], *second[:, 0]]))


def test_entries_are_paired_by_name_or_by_index() -> None:
    found = match_entries("delta", "state", ("b", "g", "a"), ("a", "b", "c"), (3, 3), ())
    assert (found.actions, found.positions) == ((0, 2), (1, 0))
    assert match_entries("delta", "state", (), ("a", "b"), (3, 2), ("1",)).actions == (0,)
    assert match_entries("delta", "state", ("b", "a"), ("a", "b"), (2, 2), ("b",)).actions == (1,)
    with pytest.raises(UserError, match="No entry of the action"):
        match_entries("delta", "state", ("x",), ("a",), (1, 1), ())
    with pytest.raises(UserError, match="Unknown entry 'grip'"):
        match_entries("delta", "state", ("a",), ("a",), (1, 1), ("grip",))


@pytest.mark.parametrize("kind", ["delta", "relative"])
def test_a_trained_policy_returns_absolute_actions_everywhere(kind: str, tmp_path: Path) -> None:
    """Training, checkpoint, resume point, further training and export decode the representation of the manifest."""
    data = record(tmp_path / "data", episodes=12)
    settings = [*SETTINGS, f"dataset={data}", f"task.action_representation={kind}", "algorithm.lr=3e-3"]
    settings += ["task.absolute_entries=['gripper [rad]']", "budget.updates=200", f"out={tmp_path}", "name=run"]
    assert main(["train", *settings]) == 0
    best = tmp_path / "run" / "checkpoints" / "best"
    policy, manifest = load_policy(best)
    assert isinstance(policy, RelativeActionPolicy) and manifest.policy == "relative_actions"
    assert manifest.config["representation"]["kind"] == kind and policy.representation.actions == (0, 1, 2, 3, 4)
    episodes = demonstrations(12)
    obs = {"state": torch.from_numpy(episodes.arrays["state"][:20])[:, None]}
    error = (policy.act(obs, deterministic=True)[:, 0].numpy() - episodes.arrays["action"][:20])[:, :5]
    assert np.abs(error).mean() < 0.05
    assert main(["verify", str(best)]) == 0
    more = [f"init_from={best}", f"dataset={data}", "budget.updates=1", "algorithm=bc", f"out={tmp_path}", "name=more"]
    assert main(["train", *more]) == 0
    assert read_manifest(tmp_path / "more" / "checkpoints" / "last").policy == "relative_actions"


def test_a_critic_of_absolute_actions_is_refused() -> None:
    """Its copy of the normaliser of actions would be the one of differences."""
    spec = PolicySpec({"state": (2,)}, action_dim=2)
    base = GaussianPolicy(GaussianConfig(hidden=(4,)), spec)
    representation = ActionRepresentation("delta", "state", (0, 1), (0, 1))
    policy = RelativeActionPolicy(RelativeActionConfig(describe(base), representation), spec)
    with pytest.raises(UserError, match="'iql' has a critic of absolute actions"):
        IQL(IQLConfig(), policy, total_updates=1)


def test_the_exported_graph_contains_the_inverse(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs robopolicy[onnx]")
    pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
    from robopolicy.deploy.bundle import open_bundle

    data = record(tmp_path / "data")
    settings = [*SETTINGS, f"dataset={data}", "task.action_representation=relative", "budget.updates=3"]
    assert main(["train", *settings, "evaluation.episodes=0", f"out={tmp_path}", "name=run"]) == 0
    last = tmp_path / "run" / "checkpoints" / "last"
    assert main(["export", str(last), "--out", str(tmp_path / "bundle")]) == 0
    policy, bundle = load_policy(last)[0], open_bundle(tmp_path / "bundle")
    state = np.linspace(-1, 1, 6, dtype=np.float32)[None]
    expected = policy.act({"state": torch.from_numpy(state)[None]}, deterministic=True)[0]
    np.testing.assert_allclose(bundle.chunk({"state": state}), expected.numpy(), atol=1e-5)
    assert bundle.manifest.action_names[0] == f"{JOINTS[0]} [rad]"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task.action_representation=deltas"], "Did you mean 'delta'?"),
        (["task.absolute_entries=[x]"], "has no effect on absolute actions"),
        (["task.action_representation=delta", "task.absolute_entries=[grip]"], "Unknown entry 'grip'"),
        (["task.action_representation=delta", "task.obs_keys=[image.front]"], "need 'state'"),
        (
            ["task.action_representation=delta", "algorithm=iql", "replay.offline_updates=1"],
            "needs imitation",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message, tmp_path, refused) -> None:
    data = record(tmp_path / "data", camera=True, reward=True)
    changed = {text.partition("=")[0] for text in settings}
    base = [text for text in SETTINGS if text.partition("=")[0] not in changed]
    line = refused("train", *base, f"dataset={data}", "budget.updates=1", *settings, f"out={tmp_path}/runs")
    assert message in line and not (tmp_path / "runs").exists()
