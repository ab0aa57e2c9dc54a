"""Tests of plain modules as policies: chunks equal the module's output, frozen, stored with the weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.interop.sources import ModulePolicy, register_module
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (6,)}, action_dim=2, horizon=4, action_horizon=2)
OBS = {"state": torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0))}


class Network(nn.Module):
    """chunk = noise + linear(state), with a dropout that must be inactive."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, obs: dict[str, Tensor], noise: Tensor | None = None) -> Tensor:
        mean = self.dropout(self.layer(obs["state"].flatten(1))).view(-1, 4, 2)
        return mean if noise is None else mean + noise


def test_module_policy_returns_module_chunks_without_dropout_or_gradients() -> None:
    network, noise = Network(), torch.randn(5, 4, 2)
    policy = ModulePolicy.wrap("network", network, SPEC).train()
    chunk = policy.decode(OBS, noise)
    assert torch.equal(chunk, network.eval()(OBS, noise)) and not chunk.requires_grad
    assert torch.equal(ModulePolicy.wrap("plain", network, SPEC, noise=False).act(OBS), network(OBS))
    with pytest.raises(TypeError, match="'module' has no method decode"):
        ModulePolicy.wrap("plain", network, SPEC, noise=False).decode(OBS, noise)


def test_steering_sets_the_noise_of_the_module() -> None:
    network = Network().eval()
    actor = replace(STEERING_ACTOR, hidden=(8,))
    steered = LatentPolicy.from_base(
        ModulePolicy.wrap("network", network, SPEC), NoiseSpace("repeat", bound=1.5), actor
    )
    steered.update_stats(OBS)
    sampled = steered.sample(OBS, generator=torch.Generator().manual_seed(0))
    noise = 1.5 * sampled.record["raw"].tanh().expand(5, 4, 2)
    torch.testing.assert_close(sampled.chunk, network(OBS, noise))


def test_checkpoint_contains_the_weights_and_needs_the_registered_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ModulePolicy.wrap("network", Network(), SPEC)
    save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample=OBS)
    monkeypatch.setattr("robopolicy.interop.sources.MODULES", {})
    with pytest.raises(
        UserError, match=r"module 'network', whose code is not in a checkpoint; register it by .*register_module"
    ):
        load_policy(tmp_path / "c")
    register_module("network", Network)
    assert verify_checkpoint(tmp_path / "c").ok
    loaded, _ = load_policy(tmp_path / "c")
    assert all(
        torch.equal(a, b) for a, b in zip(policy.state_dict().values(), loaded.state_dict().values(), strict=True)
    )
    register_module("network", lambda: nn.Linear(6, 8))
    with pytest.raises(UserError, match=r"lacks weight 'module\.bias'"):
        load_policy(tmp_path / "c")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda obs, noise: noise[:, :3], r"returned shape \(5, 3, 2\) instead of chunks of shape \(5, 4, 2\)"),
        (lambda obs, noise: noise * float("inf"), "returned a non-finite action"),
        (lambda obs, noise: {"actions": noise}, r"returned dict instead of chunks of shape \(5, 4, 2\)"),
        (lambda obs, noise: obs["pose"], r"gave no chunk in 1 attempts \(KeyError: 'pose'\)"),
    ],
)
def test_modules_with_invalid_output_are_refused(module: object, message: str) -> None:
    class Wrong(nn.Module):
        def forward(self, obs: dict[str, Tensor], noise: Tensor) -> object:
            return module(obs, noise)  # type: ignore[operator]

    with pytest.raises(UserError, match=f"The module 'wrong' {message}") as refusal:
        ModulePolicy.wrap("wrong", Wrong(), SPEC).act(OBS)
    assert "\n" not in str(refusal.value)
