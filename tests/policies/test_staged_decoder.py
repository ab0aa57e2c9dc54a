"""Tests of the staged decoder of GoRL: the identity first, then a head; checkpoints store the stage."""

from pathlib import Path

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.nested import describe
from robopolicy.policies.wrappers.staged import StagedDecoder, StagedDecoderConfig
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=2)
OBS = {"state": torch.zeros(4, 1, 3)}


def head() -> FlowPolicy:
    policy = FlowPolicy(FlowConfig(hidden=(8,), normalization="identity"), SPEC)
    policy.fit_normalizer({"action": {"min": [-1.0, 0.0], "max": [1.0, 4.0]}})
    return policy


def test_the_identity_decoder_is_tanh_scaled_to_the_bounds() -> None:
    decoder = StagedDecoder.wrap(head(), identity=True)
    noise = torch.randn(4, 2, 2)
    expected = noise.tanh() * torch.tensor([1.0, 2.0]) + torch.tensor([0.0, 2.0])
    torch.testing.assert_close(decoder.decode(OBS, noise), expected)
    assert decoder.nfe == 0


@pytest.mark.parametrize("mode", ["meanstd", "identity"])
def test_a_head_without_bounds_cannot_start_as_the_identity(mode: str) -> None:
    config = FlowConfig(hidden=(8,), normalization="identity", action_normalization=mode, action_clip=0.0)
    inner = FlowPolicy(config, SPEC)
    with pytest.raises(UserError, match=r"policy\.action_normalization=minmax"):
        StagedDecoder.wrap(inner, identity=True)
    assert not bool(StagedDecoder.wrap(inner, identity=False).identity)


def test_a_trained_decoder_equals_its_head() -> None:
    inner = head()
    decoder = StagedDecoder.wrap(inner, identity=False)
    noise = torch.randn(4, 2, 2)
    assert torch.equal(decoder.decode(OBS, noise), inner.decode(OBS, noise))
    assert torch.equal(
        decoder.act(OBS, generator=torch.Generator().manual_seed(0)),
        inner.act(OBS, generator=torch.Generator().manual_seed(0)),
    )
    assert decoder.nfe == inner.nfe


@pytest.mark.parametrize("identity", [True, False])
def test_a_checkpoint_stores_the_stage(identity: bool, tmp_path: Path) -> None:
    decoder = StagedDecoder.wrap(head(), identity=identity)
    save_checkpoint(tmp_path / "c", decoder, task="toy/point_mass", obs_sample=OBS)
    assert verify_checkpoint(tmp_path / "c").ok
    loaded, _ = load_policy(tmp_path / "c")
    noise = torch.randn(4, 2, 2)
    assert torch.equal(loaded.decode(OBS, noise), decoder.decode(OBS, noise))


def test_only_denoising_heads_can_be_decoders() -> None:
    config = StagedDecoderConfig(describe(GaussianPolicy(GaussianConfig(), SPEC)))
    with pytest.raises(UserError, match="flow or diffusion, got 'gaussian'"):
        StagedDecoder(config, SPEC)
